"""Changes of the user's objects that last for one block: patched methods, silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline.lightning_private import LOGGERS, TRAINER
from lightning_pipeline.splitting import state_items
from lightning_pipeline.splitting.watch import replaced
from lightning_pipeline.steps.attributes import ABSENT
from lightning_pipeline.steps.pending import Pending, TensorMeta


@contextmanager
def patched(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Sets instance attributes for the block, past any ``__setattr__``, and puts them back.

    Args:
        changes: Owner, name and value of each; ``ABSENT`` takes it away.
    """
    undo, behind = [], []
    for owner, key, value in changes:
        old = owner.__dict__.get(key, ABSENT)
        undo.append((owner, key, old))
        # A method of ours says nothing of the user's settings.
        if callable(value) and (id(owner), key) not in replaced:
            replaced[id(owner), key] = old
            behind.append((id(owner), key))
        put(owner, key, value)
    try:
        yield
    finally:
        for owner, key, old in reversed(undo):
            put(owner, key, old)
        for place in behind:
            del replaced[place]


def put(owner: object, key: str, value: Any) -> None:
    """Sets one instance attribute, or takes it away."""
    if value is ABSENT:
        owner.__dict__.pop(key, None)
    else:
        owner.__dict__[key] = value


def present(changes: Iterable[tuple[object, str, Any]]) -> list[tuple[object, str, Any]]:
    """What is now where ``changes`` would put something else."""
    return [(owner, key, owner.__dict__.get(key, ABSENT)) for owner, key, _ in changes]


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
    trainer = module.__dict__.get(TRAINER)
    if trainer is not None:
        changes += [(trainer, "print", _nothing)]
        changes += [(trainer, LOGGERS, [_SilentLogger(logger) for logger in trainer.loggers])]
    for child in module.modules():
        if isinstance(child, Metric):
            changes += [(child, method, nothing) for method in ("forward", "update", "compute")]
    return changes
