"""A module made safe to run on fake tensors, and put back exactly as it was."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeline.lightning_private import TRAINER
from lightning_pipeline.splitting.pictures import Picture
from lightning_pipeline.splitting.placeholder import is_elsewhere
from lightning_pipeline.splitting.state import StateItem, state_items
from lightning_pipeline.splitting.torch_private import (
    FakeTensor,
    FakeTensorMode,
    causal_masks_unread,
    disable_current_modes,
    fake_tensor,
    flush_flat_weights,
    single_level_function,
    storage_of,
)

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_SEED = 0x5EED5EED5EED  # of torch's generator, so that any other shows that it was seeded

_lock = threading.RLock()
_MISSING = object()


class Watcher(Protocol):
    """What is told of module calls and the like while a sandbox is open."""

    def on_call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """Called in place of ``original(module, *args, **kwargs)``."""

    def on_function(
        self, original: Callable[..., Any], function: type, args: tuple, kwargs: dict
    ) -> Any:
        """Called in place of ``function.apply(*args, **kwargs)`` of a custom autograd function."""

    def on_read(self, original: Callable[..., Any], module: nn.Module, name: str) -> Any:
        """Called in place of ``original(module, name)``, which reads an attribute."""

    def on_read_trainer(self, original: Callable[..., Any], trainer: Any, name: str) -> Any:
        """Called in place of ``original(trainer, name)`` for the LightningModule's Trainer."""

    def on_assign(self, module: nn.Module, attribute: str, value: object) -> None:
        """Called before ``module.attribute = value``."""


class Sandbox:
    """Stand-ins without memory for a module's weights, and the way back.

    Attributes:
        module: The module.
        device: Where the stand-ins pretend to be.
        names: Dotted names of the module and its submodules by id.
        items: Every entry of parameters and buffers, with the original tensors.
        stand_ins: Stand-in of each original, by the original's id.
        originals: Original of each stand-in, by the stand-in's id.
        written_in_trials: Stand-ins, by id, whose made-up values the last trial runs wrote to.
        state_names: Canonical name of each stand-in, by id.
        storage_names: The same, by storage.
        has_placeholders: Whether some of the originals are placeholders.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.names = {id(child): name for name, child in module.named_modules()}
        # TorchScript keeps its tensors in C++, out of reach; its modules run on the real ones
        self.items = [
            item
            for item in state_items(module)
            if not isinstance(item.owner, torch.jit.ScriptModule)
        ]
        self.stand_ins: dict[int, Tensor] = {}
        self.written_in_trials: set[int] = set()
        self.originals: dict[int, Tensor] = {}
        self.state_names: dict[int, str] = {}
        self.entry_names: dict[tuple[int, str], str] = {}
        with disable_current_modes():
            for item in self.items:
                if id(item.tensor) not in self.stand_ins:
                    stand_in = self._weight(item.tensor)
                    self.stand_ins[id(item.tensor)] = stand_in
                    self.originals[id(stand_in)] = item.tensor
                    self.state_names[id(stand_in)] = item.name
                name = self.state_names[id(self.stand_ins[id(item.tensor)])]
                self.entry_names[id(item.owner), item.key] = name
        self.storage_names = {
            storage_of(t): self.state_names[id(t)] for t in self.stand_ins.values()
        }
        self.has_placeholders = any(is_elsewhere(item.tensor) for item in self.items)
        self.attributes = [(child, dict(child.__dict__)) for child in module.modules()]
        self._entries = [
            (attributes[key], dict(attributes[key]))
            for _, attributes in self.attributes
            for key in _REGISTRIES
        ]
        self.picture = Picture((self.names[id(child)], child) for child, _ in self.attributes)

    def _weight(self, tensor: Tensor) -> Tensor:
        """What :meth:`stand_in_for` makes, in a tenth of the time."""
        if tensor.layout is not torch.strided:
            return self.stand_in_for(tensor)
        fake = fake_tensor(self.fake, tensor, self.device)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # as nn.Parameter does with a tensor of a subclass
        return fake

    def stand_in_for(self, tensor: Tensor, *, as_input: bool = False) -> Tensor:
        """A fake tensor with the metadata of ``tensor``, on this sandbox's device.

        Args:
            tensor: Any tensor; only its metadata is read.
            as_input: Make it a non-leaf, since a module may write in place to what it is given.
        """
        with self.fake, torch.enable_grad():
            fake: Tensor
            if tensor.layout is not torch.strided:
                fake = self.fake.from_tensor(tensor.detach())
            else:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            fake.requires_grad_(tensor.requires_grad)
            return fake.clone() if as_input and tensor.requires_grad else fake

    @contextlib.contextmanager
    def open(self, watcher: Watcher) -> Iterator[None]:
        """Put the stand-ins in place and report to ``watcher``; undo everything at the end."""
        with (
            _lock,
            _same_rng(self.device),
            _quiet(),
            torch.compiler.set_stance("force_eager"),
            causal_masks_unread(any(i.tensor.dtype == torch.float64 for i in self.items)),
            _watched(watcher, self.module),
        ):
            try:
                for item in self.items:
                    item.entries[item.key] = self.stand_ins[id(item.tensor)]
                for child, _ in self.attributes:
                    flush_flat_weights(child)
                yield
            finally:
                self._restore()
                if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
                    torch.clear_autocast_cache()  # it holds casts of stand-ins

    def _restore(self) -> None:
        self.picture.restore()
        for entries, content in self._entries:
            entries.clear()
            entries.update(content)
        for child, attributes in self.attributes:
            child.__dict__.clear()
            child.__dict__.update(attributes)

    def state_of(self, module: nn.Module) -> list[StateItem]:
        """Entries of ``module`` and what is below it, with the stand-ins as tensors."""
        return [
            item for item in state_items(module) if (id(item.owner), item.key) in self.entry_names
        ]

    def rebound(self) -> Iterator[tuple[StateItem, Tensor]]:
        """Entries that no longer hold their stand-in, with the stand-in."""
        for item in self.items:
            stand_in = self.stand_ins[id(item.tensor)]
            if item.entries.get(item.key) is not stand_in:
                yield item, stand_in

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether a tensor that nobody recorded must have been made during the recording."""
        return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Modules that cannot run on stand-ins are dealt with; torch would log each as an error."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _same_rng(device: torch.device) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(_SEED)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _watched(watcher: Watcher, module: nn.Module) -> Iterator[None]:
    """Report calls of modules, of autograd functions, and assignments to modules.

    The class attributes are patched for the whole process, for this thread only.
    """
    thread = threading.get_ident()
    # a class that overrides __call__ hides nn.Module's
    classes = [cls for child in module.modules() for cls in type(child).__mro__]
    calls = {
        cls: vars(cls)["__call__"]
        for cls in {*classes, nn.Module}
        if "__call__" in vars(cls) and issubclass(cls, nn.Module)
    }
    reads = {cls: vars(cls)["__getattribute__"] for cls in classes if _reads_itself(cls)}
    reads[nn.Module] = object.__getattribute__
    trainer = type(module.__dict__.get(TRAINER))
    assign = nn.Module.__setattr__

    def watched_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            return watcher.on_call(original, self, args, kwargs)

        return __call__

    def watched_read(original: Callable[..., Any], on_read: Callable[..., Any]) -> Any:
        def __getattribute__(self: Any, name: str) -> Any:
            if threading.get_ident() != thread:
                return original(self, name)
            return on_read(original, self, name)

        return __getattribute__

    def watched_assign(self: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == thread:
            watcher.on_assign(self, name, value)
        assign(self, name, value)

    def watched_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # below Function.apply, so that an alias made at import (`f = F.apply`) is seen too
        original = super(single_level_function, cls).apply  # type: ignore[misc]
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return watcher.on_function(original, cls, args, kwargs)

    patches: list[tuple[type, str, Any]] = [
        *((cls, "__call__", watched_call(original)) for cls, original in calls.items()),
        *((cls, "__getattribute__", watched_read(r, watcher.on_read)) for cls, r in reads.items()),
        (nn.Module, "__setattr__", watched_assign),
        (single_level_function, "apply", classmethod(watched_apply)),
    ]
    if trainer is not type(None):
        read = watched_read(trainer.__getattribute__, watcher.on_read_trainer)
        patches.append((trainer, "__getattribute__", read))
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in patches]
    try:
        for owner, name, patch in patches:
            setattr(owner, name, patch)
        yield
    finally:
        for owner, name, found in before:
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)


def _reads_itself(kind: type) -> bool:
    """Whether a class of modules has its own way to find attributes."""
    return "__getattribute__" in vars(kind) and issubclass(kind, nn.Module)
