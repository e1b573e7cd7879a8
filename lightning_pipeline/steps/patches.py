"""Changes of the user's objects that last for one block: patched methods, silence, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.pending import Pending, TensorMeta

_MISSING = object()


@contextmanager
def patched(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Sets instance attributes for the block, past any ``__setattr__``, and puts them back."""
    undo = []
    for owner, key, value in changes:
        undo.append((owner.__dict__, key, owner.__dict__.get(key, _MISSING)))
        owner.__dict__[key] = value
    try:
        yield
    finally:
        for attributes, key, old in reversed(undo):
            if old is _MISSING:
                attributes.pop(key, None)
            else:
                attributes[key] = old


def targets(
    module: LightningModule, opaque_forward: bool, only: str | None
) -> list[tuple[str, nn.Module]]:
    """The modules whose calls a step is cut at: those with weights, metrics excepted.

    Args:
        module: The user's LightningModule.
        opaque_forward: Look through its own forward at the calls inside it.
        only: The single module to cut; the step's own code uses the weights of the others.
    """
    if only is not None:
        return [(only, module.get_submodule(only))]
    found: list[tuple[str, nn.Module]] = []
    metrics = [name + "." for name, m in module.named_modules() if isinstance(m, Metric)]
    for name, child in module.named_modules():
        inside_metric = isinstance(child, Metric) or any(name.startswith(m) for m in metrics)
        if inside_metric or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            continue
        if (name or not opaque_forward) and next(state_items(child), None) is not None:
            found.append((name, child))
    return found


def assigned_attributes(module: LightningModule, before: dict[str, Any]) -> tuple[str, ...]:
    """Names that a step has set on the LightningModule to values that can be sent.

    Args:
        module: The user's LightningModule.
        before: Its attributes before the step.
    """
    sendable = (type(None), bool, int, float, str, Tensor, np.ndarray)
    return tuple(
        name
        for name, value in module.__dict__.items()
        if before.get(name, _MISSING) is not value
        and all(isinstance(leaf, sendable) for leaf in pytree.tree_leaves(value))
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what only tells the user something."""


class _SilentLogger:
    """A logger that says what it is and logs nothing."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self.experiment = logger, DummyExperiment()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._logger, name)
        return _nothing if callable(value) and name.startswith(("log_", "save")) else value


def past_compilation(child: nn.Module, inside: Callable[[], bool]) -> list[tuple[object, str, Any]]:
    """The patch under which the call of a module that was compiled in place can be cut.

    Such a module, `net.compile()`, is not called through its own forward.

    Args:
        child: Any module.
        inside: Whether a call is being run, so that this one is a call inside it.
    """
    compiled = child._compiled_call_impl
    if compiled is None:
        return []

    def called(*args: Any, **kwargs: Any) -> Any:
        return (compiled if inside() else child._call_impl)(*args, **kwargs)

    return [(child, "_compiled_call_impl", called)]


def silenced(module: LightningModule, readable: bool = False) -> list[tuple[object, str, Any]]:
    """Patches under which logging, printing and metrics of a step do nothing.

    Args:
        module: The user's LightningModule.
        readable: Whether the step may read the NaN that a metric then gives.
    """

    def nothing(*args: Any, **kwargs: Any) -> Tensor:
        meta = TensorMeta((), torch.get_default_dtype(), False)
        device = torch.device("cpu")
        return meta.fill(float("nan"), device) if readable else Pending.like(meta, device)

    changes: list[tuple[object, str, Any]] = [
        (module, "log", _nothing),
        (module, "print", _nothing),
    ]
    trainer = module.__dict__.get("_trainer")
    if trainer is not None:
        changes += [(trainer, "print", _nothing)]
        changes += [(trainer, "_loggers", [_SilentLogger(logger) for logger in trainer.loggers])]
    for child in module.modules():
        if isinstance(child, Metric):
            changes += [(child, method, nothing) for method in ("forward", "update", "compute")]
    return changes


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Puts back buffers, attributes and the contents of containers on every module."""
    attributes = [(child, dict(child.__dict__)) for child in module.modules()]
    contents = [
        (value, type(value)(value))
        for _, saved in attributes
        for key, value in saved.items()
        if type(value) in (list, dict, set)
        and (key in ("_parameters", "_buffers") or not key.startswith("_"))
    ]
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not is_elsewhere(b)]
    try:
        yield
    finally:
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        for child, saved in attributes:
            child.__dict__.clear()
            child.__dict__.update(saved)
        with torch.no_grad():
            for buffer, saved_buffer in buffers:
                buffer.copy_(saved_buffer)
