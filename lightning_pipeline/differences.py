"""How far gradients and losses are from references, and how far rounding may bring them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_NOISE = 4.0  # a gradient that is zero but for rounding, in roundings of the largest one


class Rounding(NamedTuple):
    """How exactly a step computes.

    Attributes:
        name: Its coarsest floating-point type.
        eps: Distance from 1 to the next number of it.
    """

    name: str
    eps: float

    @property
    def expected(self) -> float:
        """Relative differences that its rounding may make: half of its digits are lost."""
        return math.sqrt(self.eps)

    def noise(self, largest: float) -> float:
        """What is no difference beside the expected ones, in a model whose gradients go up to
        ``largest``: a gradient may be zero but for rounding.
        """
        return _NOISE * self.expected * largest


def rounding_of(module: nn.Module, device: torch.device, context: Callable[[], Any]) -> Rounding:
    """The coarsest type that a step computes in.

    Args:
        module: The LightningModule.
        device: The rank's device.
        context: The precision plugin's context of the step.
    """
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    kinds = kinds or {torch.get_default_dtype()}
    with context():
        if torch.is_autocast_enabled(device.type):
            kinds.add(torch.get_autocast_dtype(device.type))
    found = [Rounding(str(kind).removeprefix("torch."), torch.finfo(kind).eps) for kind in kinds]
    if device.type == "cuda" and torch.float32 in kinds and _takes_tf32(module):
        found.append(Rounding("float32 in TF32 operations", 2.0**-10))
    return max(found, key=lambda rounding: rounding.eps)


def _takes_tf32(module: nn.Module) -> bool:
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED
    convolves = any(isinstance(child, kinds) for child in module.modules())
    cudnn = convolves and torch.backends.cudnn.allow_tf32
    return cudnn or torch.get_float32_matmul_precision() != "highest"


class Difference(NamedTuple):
    """How far a gradient is from its reference, both without the loss scale.

    Attributes:
        name: Name of the parameter.
        stage: A stage that holds it.
        absolute: Largest difference of an entry.
        size: Largest entry of the reference.
        is_missing: Whether it is nothing but zeros, and the reference is not.
        overflows: Whether an entry is infinite or no number.
        reference_overflows: Whether one of the reference is.
    """

    name: str
    stage: int
    absolute: float
    size: float
    is_missing: bool
    overflows: bool
    reference_overflows: bool

    @property
    def relative(self) -> float:
        """The difference relative to the largest entry of the reference."""
        return self.beyond(0.0)

    def beyond(self, noise: float) -> float:
        """The difference relative to that entry and what is ``noise`` in any gradient.

        Rounding does not make all of a gradient zero, so one that is missing is judged without it.
        """
        if not self.absolute:
            return 0.0
        noise = 0.0 if self.is_missing else noise
        return self.absolute / (self.size + noise) if self.size + noise else math.inf


def measure(
    name: str, stage: int, gradient: Tensor | None, reference: Tensor, scale: float
) -> Difference:
    """Compares a gradient with its reference.

    Args:
        name: Name of the parameter.
        stage: A stage that holds it.
        gradient: The gradient; ``None`` is zero.
        reference: On the host, of the gradient's shape.
        scale: The loss scale that is in both.
    """
    if not reference.numel():
        return Difference(name, stage, 0.0, 0.0, False, False, False)
    found = torch.zeros_like(reference)
    if gradient is not None:
        found = gradient.detach().to_dense().to("cpu", reference.dtype)
    lost, lost_too = ~found.isfinite(), ~reference.isfinite()
    distance = (found - reference).abs().masked_fill(lost & lost_too, 0.0)
    absolute = float(distance.nan_to_num(math.inf, math.inf).max()) / scale
    size = float(reference.abs().masked_fill(lost_too, 0.0).max()) / scale
    is_missing = not found.any() and bool(reference.any())
    overflows = bool(lost.any()), bool(lost_too.any())
    return Difference(name, stage, absolute, size, is_missing, *overflows)


def apart(own: float, reference: float) -> float:
    """Relative distance of two losses; 0 for two that are both no number."""
    if own == reference or (math.isnan(own) and math.isnan(reference)):
        return 0.0
    distance = abs(own - reference) / max(abs(own), abs(reference))
    return math.inf if math.isnan(distance) else distance
