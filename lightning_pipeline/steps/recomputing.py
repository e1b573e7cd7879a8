"""Calls whose activations are not kept but computed again in the backward.

torch's non-reentrant checkpoint does it. It knows of torch's random numbers and of autocast alone;
what else a forward reads and leaves behind is seen to here: the second run of a call begins with
what the first one began with, and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting.ambient import Setting, ambient_settings, changed, restored
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.contents import SCANNED, SMALL, Contents, lost
from lightning_pipeline.steps.entries import Layout, Owner, Slot, Values, put_entries
from lightning_pipeline.steps.patches import patched, silenced
from lightning_pipeline.steps.streams import random_state, resumed

_Change = tuple[object, str, Any]


@dataclass
class _Start:
    """What a call began with.

    Attributes:
        random: State of the random generators.
        ambient: Autograd, autocast and the like.
        values: Attributes and buffers.
        slots: The tensors among them.
        contents: What the others held.
    """

    random: Any
    ambient: tuple[Setting, ...]
    values: Values
    slots: list[Slot]
    contents: Contents


class Recomputation:
    """Calls of one module, or of a part of it, that keep only their arguments.

    Args:
        module: The module.
        root: The LightningModule that it is in.
        device: The rank's device.
    """

    def __init__(self, module: nn.Module, root: LightningModule, device: torch.device) -> None:
        self._module, self._root, self._device = module, root, device
        self._kind = type(module).__name__
        self._silenced: list[_Change] | None = None
        self._look()
        self._values: Values | None = None
        self._modes: set[tuple[bool, ...]] = set()
        # By dictionary and name: tensors that are written, and those of which torch does not count
        # it; the last copy of each.
        self._written: set[tuple[int, str]] = set()
        self._uncounted: set[tuple[int, str]] = set()
        self._copies: dict[tuple[int, str], tuple[Any, int, Tensor | None]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)``, and once more in its backward.

        Raises:
            StepError: If it changes something in place that cannot be put back.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # As separate arguments, or a write to one of them in place would not be noticed.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        slots = [(isinstance(x, Tensor), None if isinstance(x, Tensor) else x) for x in leaves]
        values = self._now()
        modes = tuple([attributes["training"] for attributes in self._attributes])
        is_new, ran = modes not in self._modes, False
        start = self._start(values, is_new)

        def run(*given: Tensor) -> Any:
            nonlocal ran
            rest = iter(given)
            flat = [next(rest) if is_tensor else value for is_tensor, value in slots]
            args, kwargs = pytree.tree_unflatten(flat, spec)
            if ran:
                with self._again(start):
                    return function(*args, **kwargs)
            ran = True
            out = function(*args, **kwargs)
            self._learn(start, is_new)
            self._modes.add(modes)
            return out

        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)

    def _look(self) -> None:
        """Finds the modules."""
        named = {child: name for name, child in self._module.named_modules()}
        named.setdefault(self._root, "")
        self._attributes = [child.__dict__ for child in named]
        self._below = [child._modules for child in named]
        self._children = list(chain.from_iterable(map(dict.values, self._below)))
        self._owners = [Owner(c, c.__dict__, name, "attribute") for c, name in named.items()]
        self._owners += [Owner(c, c._buffers, name, "buffer") for c, name in named.items()]
        self._entries = [owner.entries for owner in self._owners]
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def _now(self) -> Values:
        """What all attributes and buffers are; the same object again if nothing was set."""
        children = list(chain.from_iterable(map(dict.values, self._below)))
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._look()
        sizes = tuple(map(len, self._entries))
        layout = self._layouts.get(sizes)
        try:
            flat = None if layout is None else layout.values()
        except KeyError:
            flat = None
        if layout is None or flat is None:
            if len(self._layouts) > 8:
                self._layouts.clear()
            layout = self._layouts[sizes] = Layout(self._owners)
            flat = layout.values()
        last = self._values
        if last is None or last.layout is not layout or not all(map(is_, flat, last.flat)):
            scanned = {kind for kind in set(map(type, flat)) if issubclass(kind, SCANNED)}
            where = [i for i, value in enumerate(flat) if type(value) in scanned]
            self._values = last = Values(layout, flat, where)
        return last

    def _start(self, values: Values, is_new: bool) -> _Start:
        slots, contents = [], Contents()
        seen: set[int] = set()
        for index in values.scanned:
            place, value = values.layout.places[index], values.flat[index]
            if place is None or place[0].is_metric:  # which is silent in the second run
                continue
            owner, key = place
            if not isinstance(value, Tensor):
                contents.add(value, self._name(owner, key), seen)
            elif type(value) is Tensor and not value.is_inference():
                slots.append(self._slot(owner, key, value, is_new))
        kept = {id(slot.tensor) for slot in slots}
        contents.tensors = [entry for entry in contents.tensors if id(entry[0]) not in kept]
        return _Start(random_state(self._device), ambient_settings(), values, slots, contents)

    def _slot(self, owner: Owner, key: str, tensor: Tensor, is_new: bool) -> Slot:
        place, version = (id(owner.entries), key), tensor._version
        slot = Slot(owner, key, tensor, version, None)
        if tensor.requires_grad:
            return slot
        is_small = tensor.numel() <= SMALL
        what = tensor if is_small else id(tensor)
        last, last_version, value = self._copies.get(place, (None, 0, None))
        is_last = last is what if is_small else last == what
        if is_last and last_version != version:
            self._written.add(place)
        slot.written = place in self._uncounted or (owner.is_norm and owner.module.training)
        if is_small and is_last and last_version == version and not slot.written:
            slot.value = value
        elif is_small or is_new or slot.written or place in self._written:
            slot.value = tensor.detach().clone()
        self._copies[place] = what, version, slot.value if is_small else None
        return slot

    def _learn(self, start: _Start, is_new: bool) -> None:
        """Notes what the call has written to."""
        for slot in start.slots:
            place = id(slot.owner.entries), slot.key
            if slot.tensor._version != slot.version:
                self._written.add(place)
                slot.written = True
                if slot.value is None:
                    raise self._late(slot)
            elif is_new and slot.value is not None and not torch.equal(slot.value, slot.tensor):
                # torch's batch_norm counts no version of what it writes.
                self._uncounted.add(place)
                slot.written = True
        for tensor, version, where in start.contents.tensors:
            if tensor._version != version:
                raise lost(where, "holds a tensor that was written to")

    def _late(self, slot: Slot) -> StepError:
        if slot.tensor.requires_grad:
            return lost(self._name(slot.owner, slot.key), "needs a gradient and was written to")
        return StepError(
            f"{self._kind} wrote to its {slot.owner.kind} {slot.owner.prefix + slot.key!r}, which "
            "its earlier calls did not, so the value that it began with is not known when its "
            "activations are computed again. Let it write in each call, or say "
            "activation_checkpointing='none'."
        )

    def _name(self, owner: Owner, key: str) -> str:
        kind = type(self._root).__name__ if owner.module is self._root else self._kind
        return f"{kind}: the {owner.kind} {owner.prefix + key!r}"

    @contextmanager
    def _again(self, start: _Start) -> Iterator[None]:
        """Lets a call begin with ``start`` and leave nothing."""
        if self._silenced is None:
            self._silenced = silenced(self._root, readable=True)
        for tensor, version, where in start.contents.tensors:
            if tensor._version != version:
                raise lost(where, "holds a tensor that was written to")
        # Other tensors in their places: what the backward needs of the real ones stays untouched.
        copies: dict[int, Tensor] = {}
        for slot in start.slots:
            if slot.written or slot.tensor._version != slot.version:
                if slot.value is None:
                    raise lost(self._name(slot.owner, slot.key), "was written to in place")
                copies.setdefault(id(slot.tensor), slot.value.clone())
        now = self._now()
        try:
            put_entries(start.values.unlike(now))
            put_entries(
                (slot.owner.entries, slot.key, copies[id(slot.tensor)])
                for slot in start.slots
                if id(slot.tensor) in copies
            )
            with (
                start.contents.again(),
                restored(changed(start.ambient, ambient_settings())),
                resumed(start.random, self._device),
                patched(self._silenced),
            ):
                yield
        finally:
            put_entries(now.unlike(self._now()))


def recomputed_blocks(
    root: LightningModule,
    kinds: tuple[type[nn.Module], ...],
    device: torch.device,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> list[_Change]:
    """Patches under which every call of a module of some classes is computed again.

    Args:
        root: The LightningModule.
        kinds: The classes.
        device: The rank's device.
        wrap: Made of each module's forward before.
    """

    def again(child: nn.Module) -> Callable[..., Any]:
        run = partial(Recomputation(child, root, device), wrap(child.forward))
        # What is compiled around it has a break here: it could not look into a checkpoint.
        return torch.compiler.disable(lambda *args, **kwargs: run(*args, **kwargs))

    blocks = (child for child in root.modules() if isinstance(child, kinds))
    return [(child, "forward", again(child)) for child in blocks]
