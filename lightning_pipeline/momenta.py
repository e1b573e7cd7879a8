"""Whether saved optimizer state is that of the optimizers at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer

from lightning_pipeline.sharded import parameter_names

_OTHER_SHAPES = (Adafactor, LBFGS)  # of torch's own, whose state has not the parameters' shapes


def check_optimizer_states(
    module: LightningModule, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]
) -> None:
    """Refuses optimizer state that would be loaded for other parameters, or not at all.

    Args:
        module: The module whose parameters the optimizers have, for their names.
        optimizers: The optimizers; the shapes of state are known for torch's own.
        states: Their saved state dicts.

    Raises:
        ValueError: If the optimizers, their parameters or a shape differ.
    """
    if len(states) != len(optimizers):
        raise ValueError(
            f"It has the state of {len(states)} optimizers, and configure_optimizers gives "
            f"{len(optimizers)}."
        )
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        if "param_groups" not in state:  # an optimizer with a state dict of its own
            continue
        saved, own = (
            [len(group["params"]) for group in groups]
            for groups in (state["param_groups"], optimizer.param_groups)
        )
        if saved != own:
            raise ValueError(
                f"Its optimizer {number} has groups of {saved} parameters, and "
                f"{type(optimizer).__name__} of configure_optimizers has groups of {own}."
            )
        known = type(optimizer).__module__.startswith("torch.optim.")
        if known and not isinstance(optimizer, _OTHER_SHAPES):
            _check_shapes(optimizer, state, parameter_names(module, optimizer))


def _check_shapes(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    for number, (index, parameter) in enumerate(zip(saved, parameters, strict=True)):
        for key, value in state["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"Optimizer state {key} of {names.get(number, number)} has shape "
                    f"{tuple(value.shape)} there, and the parameter has {tuple(parameter.shape)}."
                )
