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
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import is_elsewhere
from lightning_pipeline.splitting.ambient import Setting, ambient_settings, changed, restored
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.attributes import ABSENT, own_attributes
from lightning_pipeline.steps.patches import patched, put, silenced
from lightning_pipeline.steps.streams import random_state, resumed

_Change = tuple[object, str, Any]


@dataclass
class _Start:
    """What a call began with.

    Attributes:
        random: State of the random generators.
        ambient: Autograd, autocast and the like.
        attributes: The LightningModule's own attributes, which differ between microbatches, and
            those of the module and below that the call sets.
        buffers: Values of the buffers that the call writes, by their number.
    """

    random: Any
    ambient: tuple[Setting, ...]
    attributes: list[_Change]
    buffers: dict[int, Tensor]


class Recomputation:
    """Calls of one module, or of a part of it, that keep only their arguments.

    Args:
        module: The module.
        root: The LightningModule that it is in.
        device: The rank's device.
    """

    def __init__(self, module: nn.Module, root: LightningModule, device: torch.device) -> None:
        self._module, self._root, self._device = module, root, device
        self._buffers = [
            (child._buffers, key, f"{name}.{key}" if name else key)
            for name, child in module.named_modules()
            for key, buffer in child._buffers.items()
            if buffer is not None and not is_elsewhere(buffer)
        ]
        # For each combination of training flags, the buffers that a call writes.
        self._written: dict[tuple[bool, ...], frozenset[int]] = {}
        self._silenced: list[_Change] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)``, and once more in its backward.

        Raises:
            StepError: If it writes to a buffer that it did not write to before.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # As separate arguments, or a write to one of them in place would not be noticed.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        slots = [(isinstance(x, Tensor), None if isinstance(x, Tensor) else x) for x in leaves]
        modes = tuple(child.training for child in self._module.modules())
        start, ran = self._start(modes), False

        def run(*given: Tensor) -> Any:
            nonlocal ran
            rest = iter(given)
            flat = [next(rest) if is_tensor else value for is_tensor, value in slots]
            args, kwargs = pytree.tree_unflatten(flat, spec)
            if ran:
                with self._again(start):
                    return function(*args, **kwargs)
            ran = True
            before = [entries[key] for entries, key, _ in self._buffers]
            versions = [cast(Tensor, buffer)._version for buffer in before]
            attributes = self._attributes()
            out = function(*args, **kwargs)
            self._learn(start, modes, before, versions)
            start.attributes += _set_since(attributes)
            return out

        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)

    def _start(self, modes: tuple[bool, ...]) -> _Start:
        written = self._written.get(modes, range(len(self._buffers)))
        attributes: list[_Change] = [
            (self._root, name, value)
            for name, value in own_attributes(self._root).items()
            if not callable(getattr(type(self._root), name, None))  # a method that is patched now
        ]
        buffers = {}
        for index in written:
            entries, key, _ = self._buffers[index]
            buffers[index] = cast(Tensor, entries[key]).detach().clone()
        return _Start(random_state(self._device), ambient_settings(), attributes, buffers)

    def _learn(
        self,
        start: _Start,
        modes: tuple[bool, ...],
        before: list[Tensor | None],
        versions: list[int],
    ) -> None:
        """Notes which buffers a call has written, and forgets the values of the others."""
        now = [cast(Tensor, entries[key]) for entries, key, _ in self._buffers]
        written = {
            index
            for index, (old, version) in enumerate(zip(before, versions, strict=True))
            if now[index] is not old or now[index]._version != version
        }
        if modes not in self._written:
            # torch's batch_norm counts no version of what it writes.
            unlike = (i for i, old in start.buffers.items() if not torch.equal(old, now[i]))
            written.update(unlike)
        missing = written - start.buffers.keys()
        if missing:
            name = self._buffers[min(missing)][2]
            raise StepError(
                f"{type(self._module).__name__} wrote to its buffer {name!r}, which its earlier "
                "calls did not, so the value that it began with is not known when its activations "
                "are computed again. Let it write in each call, or say "
                "activation_checkpointing='none'."
            )
        self._written.setdefault(modes, frozenset(written))
        start.buffers = {index: start.buffers[index] for index in self._written[modes]}

    @contextmanager
    def _again(self, start: _Start) -> Iterator[None]:
        """Lets a call begin with ``start`` and leave nothing."""
        if self._silenced is None:
            self._silenced = silenced(self._root, readable=True)
        attributes = self._attributes()
        now = [entries[key] for entries, key, _ in self._buffers]
        # Other tensors in their places: what the backward needs of the real ones stays untouched.
        for index, value in start.buffers.items():
            entries, key, _ = self._buffers[index]
            entries[key] = value.clone()
        try:
            with (
                restored(changed(start.ambient, ambient_settings())),
                resumed(start.random, self._device),
                patched([*start.attributes, *self._silenced]),
            ):
                yield
        finally:
            for (entries, key, _), buffer in zip(self._buffers, now, strict=True):
                entries[key] = buffer
            for child, name, value in _set_since(attributes, graphs=True):
                put(child, name, value)

    def _attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        return [(child, dict(child.__dict__)) for child in (self._root, *self._module.modules())]


def _set_since(
    attributes: list[tuple[nn.Module, dict[str, Any]]], graphs: bool = False
) -> list[_Change]:
    """What was there before of the attributes that were set since.

    Args:
        attributes: Those of each module before.
        graphs: Whether to list tensors with a graph, whose activations would be kept.
    """
    return [
        (child, name, before.get(name, ABSENT))
        for child, before in attributes
        for name in {**before, **child.__dict__}
        if child.__dict__.get(name, ABSENT) is not before.get(name, ABSENT)
        and (graphs or getattr(before.get(name), "grad_fn", None) is None)
    ]


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
