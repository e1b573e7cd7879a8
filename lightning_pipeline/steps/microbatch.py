"""One microbatch of a pass, and how far a stage is with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.steps.dependence import Undone
from lightning_pipeline.steps.pending import tensors
from lightning_pipeline.steps.plan import StepPlan
from lightning_pipeline.transfers import placed

_SAMPLES = 16


@dataclass
class Microbatch:
    """One microbatch of a pass.

    Attributes:
        batch: The step's first argument.
        rest: Its further arguments.
        plan: What each stage does with it.
        seed: Seed of the step's random numbers, equal on every stage.
        log: Replaces ``LightningModule.log`` on the last stage.
        starts: Attributes of the LightningModule that it starts from.
        compares: Whether stages compare the arguments of calls that they have in common.
    """

    batch: Any
    rest: tuple[Any, ...]
    plan: StepPlan
    seed: int
    log: Callable[..., None]
    starts: dict[str, Any] = field(default_factory=dict)
    compares: bool = True


def fingerprint(args: Any, device: torch.device) -> Tensor:
    """A number that nearly always differs when two stages compute different arguments.

    Args:
        args: Tensors in containers.
        device: Where it is wanted, which is where most of them are.

    Returns:
        float64 of shape [].
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for position, tensor in enumerate(tensors(args)):
        if not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        samples = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        samples = (
            torch.view_as_real(samples).sum(-1) if samples.is_complex() else samples
        ).double()
        factors = torch.arange(1, samples.numel() + 1, dtype=torch.float64, device=samples.device)
        total = total + placed((samples * factors).sum() * (position + 1), device)
    return total


@dataclass
class Progress:
    """State of one run of the step on one stage."""

    results: dict[int, dict[int, Tensor]]
    live: dict[int, dict[int, Tensor]]
    marks: list[Tensor]
    num_calls: int = 0
    busy: bool = False
    ambient: tuple[Any, ...] = ()
    undone: Undone = field(default_factory=Undone)
    unpatched: list[tuple[object, str, Any]] = field(default_factory=list)
