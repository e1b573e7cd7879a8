"""Calls whose activations are not kept but computed again in the backward.

torch's non-reentrant checkpoint does it. It knows of torch's random numbers and of autocast alone;
what else a forward reads and leaves behind is seen to here: the second run of a call begins with
what the first one began with, and leaves nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting.ambient import Setting, ambient_settings, changed, restored
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.attributes import ABSENT
from lightning_pipeline.steps.patches import patched, silenced
from lightning_pipeline.steps.streams import random_state, resumed

_Change = tuple[object, str, Any]
_SMALL = 1 << 14
"""Numbers in a tensor, and entries of a container, up to which it is copied whatever it is for."""

_CONTAINERS = (list, dict, set, deque, np.ndarray, SimpleNamespace)
_RANDOM = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)
_SCANNED = (Tensor, *_CONTAINERS, *_RANDOM)
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_LIGHTNING = frozenset(vars(LightningModule())) - {"training"}


class _Owner:
    """A dictionary of a module: its attributes, or its buffers.

    Args:
        module: The module.
        entries: The dictionary.
        name: Name of the module.
        kind: What its entries are.
    """

    def __init__(self, module: nn.Module, entries: dict[str, Any], name: str, kind: str) -> None:
        self.module, self.entries, self.kind = module, entries, kind
        self.prefix = f"{name}." if name else ""
        self.is_norm = kind == "buffer" and isinstance(module, _NormBase)
        self.is_metric = isinstance(module, Metric)
        own = _OF_LIGHTNING if isinstance(module, LightningModule) else _OF_MODULE
        self.left = own if kind == "attribute" else frozenset()

    def is_patch(self, key: str) -> bool:
        """Whether an entry stands in for a method, and is of the moment."""
        method = getattr(type(self.module), key, None)
        return self.kind == "attribute" and (callable(method) or key == "_compiled_call_impl")


class _Layout:
    """The names in dictionaries at one time.

    Args:
        owners: The dictionaries.
    """

    def __init__(self, owners: list[_Owner]) -> None:
        self._getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self.places: list[tuple[_Owner, str] | None] = []
        for owner in owners:
            keys = [key for key in owner.entries if key not in owner.left]
            keys = keys * 2 if len(keys) == 1 else keys  # a getter of one gives no tuple
            if keys:
                self._getters.append((itemgetter(*keys), owner.entries))
                self.places += [None if owner.is_patch(key) else (owner, key) for key in keys]

    def values(self) -> list[Any]:
        """What is there now, place by place."""
        return list(chain.from_iterable([get(entries) for get, entries in self._getters]))


@dataclass(eq=False)
class _Values:
    """What all entries were at one time.

    Attributes:
        layout: Where they are.
        flat: The values.
        scanned: Places of those that can change in themselves.
    """

    layout: _Layout
    flat: list[Any]
    scanned: list[int]

    def named(self) -> dict[tuple[int, str], tuple[_Owner, Any]]:
        """The values by dictionary and name."""
        there = zip(self.layout.places, self.flat, strict=True)
        return {(id(p[0].entries), p[1]): (p[0], value) for p, value in there if p is not None}

    def unlike(self, now: _Values) -> list[tuple[dict[str, Any], str, Any]]:
        """Dictionary, name and value of what is something else ``now``."""
        if self is now:
            return []
        if self.layout is now.layout:
            same = map(is_, self.flat, now.flat)
            differ = [i for i, equal in enumerate(same) if not equal]
            places = [(self.layout.places[i], self.flat[i]) for i in differ]
            return [(p[0].entries, p[1], value) for p, value in places if p is not None]
        old, new = self.named(), now.named()
        return [
            ((old.get(place) or new[place])[0].entries, place[1], old.get(place, (None, ABSENT))[1])
            for place in {**old, **new}
            if old.get(place, (None, ABSENT))[1] is not new.get(place, (None, ABSENT))[1]
        ]


@dataclass(eq=False)
class _Slot:
    """A tensor that is an entry.

    Attributes:
        owner: Where it is.
        key: Its name.
        tensor: The tensor.
        version: Its version when the call began.
        value: A copy of it then; ``None`` without one.
        written: Whether the call writes to it.
    """

    owner: _Owner
    key: str
    tensor: Tensor
    version: int
    value: Tensor | None
    written: bool = False


@dataclass
class _Contents:
    """What containers, generators of random numbers and tensors in containers were.

    Attributes:
        containers: Each with what it held, or with how much if that is a lot, and its name.
        generators: Each with its state.
        tensors: Each with its version and the name of what holds it.
    """

    containers: list[tuple[Any, Any, str]] = field(default_factory=list)
    generators: list[tuple[Any, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int, str]] = field(default_factory=list)

    def add(self, value: Any, where: str, seen: set[int]) -> None:
        """Looks at ``value`` and at what is in it."""
        if isinstance(value, SimpleNamespace):
            value = vars(value)
        if id(value) in seen:
            return
        if isinstance(value, Tensor):
            if type(value) is Tensor and not value.is_inference():
                self.tensors.append((value, value._version, where))
        elif isinstance(value, _RANDOM):
            seen.add(id(value))
            self.generators.append((value, _state_of(value)))
        elif isinstance(value, _CONTAINERS):
            seen.add(id(value))
            size = value.size if isinstance(value, np.ndarray) else len(value)
            if size > _SMALL:
                self.containers.append((value, len(value), where))
                return
            content = _content(value)
            self.containers.append((value, content, where))
            if isinstance(value, np.ndarray):
                return
            for item in content.values() if isinstance(content, dict) else content:
                if isinstance(item, _SCANNED):
                    self.add(item, where, seen)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Puts all back for the block, and what is there now behind it."""
        now = [(value, _content(value, old)) for value, old, _ in self.containers]
        states = [(generator, _state_of(generator)) for generator, _ in self.generators]
        for value, old, where in self.containers:
            _fill(value, old, where)
        for generator, state in self.generators:
            _set_state(generator, state)
        try:
            yield
        finally:
            for value, old in now:
                _fill(value, old)
            for generator, state in states:
                _set_state(generator, state)


def _content(value: Any, like: Any = None) -> Any:
    if type(like) is int:  # what came behind the first ones
        return (like, value[like:]) if isinstance(value, list) else len(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return dict(value) if isinstance(value, dict) else list(value)


def _fill(value: Any, content: Any, where: str = "") -> None:
    if isinstance(content, tuple):
        value[content[0] :] = content[1]
    elif type(content) is int:
        if isinstance(value, list) and len(value) >= content:
            del value[content:]
        elif len(value) != content:
            raise _lost(where, "is a large container that changed its size")
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif not _is_same(value, content):
        if isinstance(value, list):
            value[:] = content
            return
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


def _is_same(value: Any, content: Any) -> bool:
    same = len(value) == len(content) and all(map(is_, value, content))
    if not isinstance(value, dict):
        return same
    return same and all(map(is_, value.values(), content.values()))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    is_python = isinstance(generator, random.Random)
    return generator.getstate() if is_python else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _lost(where: str, what: str) -> StepError:
    return StepError(
        f"{where} {what} since a call began whose activations are computed again, so what it began "
        "with is not known any more. Set the attribute to a new value instead of changing it in "
        "place, or say activation_checkpointing='none'."
    )


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
    values: _Values
    slots: list[_Slot]
    contents: _Contents


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
        self._values: _Values | None = None
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
        self._owners = [_Owner(c, c.__dict__, name, "attribute") for c, name in named.items()]
        self._owners += [_Owner(c, c._buffers, name, "buffer") for c, name in named.items()]
        self._entries = [owner.entries for owner in self._owners]
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def _now(self) -> _Values:
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
            layout = self._layouts[sizes] = _Layout(self._owners)
            flat = layout.values()
        last = self._values
        if last is None or last.layout is not layout or not all(map(is_, flat, last.flat)):
            scanned = {kind for kind in set(map(type, flat)) if issubclass(kind, _SCANNED)}
            where = [i for i, value in enumerate(flat) if type(value) in scanned]
            self._values = last = _Values(layout, flat, where)
        return last

    def _start(self, values: _Values, is_new: bool) -> _Start:
        slots, contents = [], _Contents()
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

    def _slot(self, owner: _Owner, key: str, tensor: Tensor, is_new: bool) -> _Slot:
        place, version = (id(owner.entries), key), tensor._version
        slot = _Slot(owner, key, tensor, version, None)
        if tensor.requires_grad:
            return slot
        is_small = tensor.numel() <= _SMALL
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
                raise _lost(where, "holds a tensor that was written to")

    def _late(self, slot: _Slot) -> StepError:
        if slot.tensor.requires_grad:
            return _lost(self._name(slot.owner, slot.key), "needs a gradient and was written to")
        return StepError(
            f"{self._kind} wrote to its {slot.owner.kind} {slot.owner.prefix + slot.key!r}, which "
            "its earlier calls did not, so the value that it began with is not known when its "
            "activations are computed again. Let it write in each call, or say "
            "activation_checkpointing='none'."
        )

    def _name(self, owner: _Owner, key: str) -> str:
        kind = type(self._root).__name__ if owner.module is self._root else self._kind
        return f"{kind}: the {owner.kind} {owner.prefix + key!r}"

    @contextmanager
    def _again(self, start: _Start) -> Iterator[None]:
        """Lets a call begin with ``start`` and leave nothing."""
        if self._silenced is None:
            self._silenced = silenced(self._root, readable=True)
        for tensor, version, where in start.contents.tensors:
            if tensor._version != version:
                raise _lost(where, "holds a tensor that was written to")
        # Other tensors in their places: what the backward needs of the real ones stays untouched.
        copies: dict[int, Tensor] = {}
        for slot in start.slots:
            if slot.written or slot.tensor._version != slot.version:
                if slot.value is None:
                    raise _lost(self._name(slot.owner, slot.key), "was written to in place")
                copies.setdefault(id(slot.tensor), slot.value.clone())
        now = self._now()
        try:
            _put(start.values.unlike(now))
            _put(
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
            _put(now.unlike(self._now()))


def _put(changes: Any) -> None:
    """Sets entries of dictionaries."""
    for entries, key, value in changes:
        if value is ABSENT:
            entries.pop(key, None)
        else:
            entries[key] = value


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
