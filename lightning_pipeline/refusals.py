"""What a pipeline cannot run, said before the first step and in the user's words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer


def check_parameters(module: LightningModule) -> None:
    """Refuses parameters whose shape is not known yet.

    Raises:
        MisconfigurationException: If there is one.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise MisconfigurationException(
                f"strategy='pipeline' must know the shape of every parameter before the first "
                f"batch, but {name!r} is lazy. Call the module once on an example before the fit, "
                "or give its input size, e.g. nn.Linear(64, 10) for nn.LazyLinear(10)."
            )


def check_module(module: LightningModule, sync_batchnorm: bool) -> None:
    """Refuses LightningModules whose optimization cannot be cut.

    Args:
        module: The user's LightningModule.
        sync_batchnorm: Whether the Trainer was asked to synchronise BatchNorm.

    Raises:
        MisconfigurationException: If it uses something that a pipeline cannot run.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"strategy='pipeline' needs automatic optimization, but {name} sets "
            "automatic_optimization=False: its training_step calls backward and the optimizer "
            "itself, which would happen once a microbatch and stage. Return the loss from "
            "training_step and remove `self.automatic_optimization = False`."
        )
    if is_overridden("backward", module):
        raise MisconfigurationException(
            f"strategy='pipeline' runs the backward inside its schedule, so {name}.backward would "
            "never be called. Remove the override; to change gradients use on_after_backward or "
            "configure_gradient_clipping."
        )
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise MisconfigurationException(
                f"strategy='pipeline' cannot run the callback {type(callback).__name__}: it keeps "
                "a second copy of the whole model on every rank. Remove it; "
                "torch.optim.swa_utils can average the checkpoints of the run afterwards."
            )
    if sync_batchnorm:
        raise MisconfigurationException(
            "strategy='pipeline' cannot be combined with Trainer(sync_batchnorm=True): Lightning "
            "would synchronise over all ranks, which hold different layers. Remove it; BatchNorm "
            "then uses the statistics of each microbatch."
        )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that need more than this rank's parameters.

    Raises:
        MisconfigurationException: If there are several, or one of them is L-BFGS.
    """
    if len(optimizers) > 1:
        raise MisconfigurationException(
            f"strategy='pipeline' works with one optimizer, configure_optimizers returned "
            f"{len(optimizers)}. Use one optimizer with several parameter groups: "
            "torch.optim.AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr': 1e-4}])."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "strategy='pipeline' cannot run LBFGS: its line search needs the whole gradient "
                "on one device. Use an optimizer that treats each parameter by itself, e.g. "
                "torch.optim.AdamW."
            )


def check_module_name(module: LightningModule, name: str | None) -> None:
    """Refuses a ``module`` argument that is not in the LightningModule.

    Raises:
        ValueError: Naming close matches.
    """
    names = [known for known, _ in module.named_modules() if known]
    if name is None or name in names:
        return
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    raise ValueError(
        f"module must be the dotted name of a module in {type(module).__name__}, got {name!r}. "
        f"The name comes from PipelineStrategy(module={name!r}). Close ones are "
        f"{', '.join(map(repr, close))}; module=None finds it by itself."
    )
