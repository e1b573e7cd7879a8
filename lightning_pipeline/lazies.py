"""Lazy modules: the first forward, which gives their parameters a shape and their first values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from lightning_pipeline.lightning_private import MODULE_DEVICE
from lightning_pipeline.observing import Candidate
from lightning_pipeline.splitting.torch_private import BatchNormBase, InstanceNormBase
from lightning_pipeline.steps.attributes import untouched
from lightning_pipeline.steps.patches import patched, silenced


def lazy_modules(module: nn.Module) -> list[nn.Module]:
    """The modules whose own parameters or buffers have no shape yet."""
    return [
        child
        for child in module.modules()
        if isinstance(child, LazyModuleMixin) and child.has_uninitialized_params()
    ]


def initialise(module: LightningModule, candidates: Sequence[Candidate]) -> bool:
    """Runs a step once as on one device, on the host, if lazy modules wait for it.

    Nothing of it stays but what lazy modules have become, with the numbers that they would have on
    one device: their weights are drawn behind the same numbers.

    Args:
        module: The user's LightningModule, all weights present.
        candidates: The steps of the run. The others run only for what the next does not call.

    Returns:
        Whether there were lazy modules.

    Raises:
        MisconfigurationException: If none of the steps calls one of them.
    """
    waiting = lazy_modules(module)
    for candidate in sorted(candidates, key=lambda candidate: not candidate.is_next):
        if lazy_modules(module):
            _run(module, candidate)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            steps = " and ".join(candidate.step for candidate in candidates)
            raise MisconfigurationException(
                f"strategy='pipeline' must know the shape of every parameter when the first batch "
                f"has come, but {name!r} is lazy and {steps} did not call its module. Give its "
                "input size, e.g. nn.Linear(64, 10) for nn.LazyLinear(10), or remove the module."
            )
    return bool(waiting)


def _run(module: LightningModule, candidate: Candidate) -> None:
    host, lazy = torch.device("cpu"), lazy_modules(module)
    modes = [(child, child.training) for child in module.modules()]
    batch = move_data_to_device(candidate.example.batch, host)
    quiet = patched([*silenced(module, readable=True), (module, MODULE_DEVICE, host)])
    try:
        if not candidate.is_next:
            module.train(candidate.step == "training_step")
        with untouched(module, but=lazy), candidate.context() or nullcontext(), quiet:
            getattr(module, candidate.step)(batch, *candidate.example.rest)
    except Exception:
        if candidate.is_next:
            raise
    finally:
        for child, training in modes:
            child.training = training
    for child in lazy:
        if child in lazy_modules(module):
            continue
        if isinstance(child, (BatchNormBase, InstanceNormBase)):
            child.reset_running_stats()
