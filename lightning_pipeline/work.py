"""What the engine runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_pipeline.steps import TensorMeta


class Work(Protocol):
    """What the engine runs: the parts of one batch's step.

    Attributes:
        num_microbatches: Number of microbatches, a count that the schedule allows.
        trains: Whether there is a backward.
        key: Equal for two batches whose boundaries have the same metadata.
    """

    trains: bool

    @property
    def num_microbatches(self) -> int:
        """At least 1."""

    @property
    def key(self) -> Hashable:
        """Compared and hashed only."""

    def boundary(self, stage: int, microbatch: int) -> list[TensorMeta]:
        """Tensors that ``stage`` receives."""

    def before_messages(self) -> None:
        """Called once, before the first message is sent or received."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        """Values for the next stage; the unscaled loss on the last."""

    def loss_factor(self, microbatch: int) -> float | Tensor:
        """What the loss of ``microbatch`` is multiplied by before its backward."""

    def seconds(self, stage: int) -> float:
        """What ``stage`` takes for one microbatch, forward and backward, as far as is known."""

    def parameters(self, stage: int) -> Iterable[nn.Parameter]:
        """Parameters of ``stage`` on this rank."""

    def returned(self, stage: int, microbatch: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradients of what ``stage`` received are there."""

    def finished(self, stage: int) -> None:
        """All weight gradients of ``stage`` are there."""
