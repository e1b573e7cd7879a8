"""The user's choices that do not depend on the model, as checked values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_pipeline.schedules import Auto, Schedule
from lightning_pipeline.steps import Manner, PartitionSpec

Recompute = Literal["none", "full", "except_last"]


@dataclass(frozen=True)
class Options:
    """What a :class:`lightning_pipeline.PipelineStrategy` was asked for.

    Attributes:
        schedule: The training schedule.
        stages_per_rank: Stages that each rank holds.
        num_microbatches: Most microbatches of a batch, or ``"auto"``.
        partition: How the model is cut.
        module: Dotted name of the pipelined module, or ``None``.
        activation_checkpointing: Stages, or classes of modules, that are recomputed in the
            backward.
        compile: Arguments of ``torch.compile`` for each stage; ``None`` runs them eagerly.
        deferred_batch_norm: Whether running statistics are those of whole batches.
    """

    schedule: Schedule
    stages_per_rank: int
    num_microbatches: int | Auto
    partition: PartitionSpec
    module: str | None
    activation_checkpointing: Recompute | tuple[type[nn.Module], ...] = "none"
    compile: dict[str, Any] | None = None
    deferred_batch_norm: bool = False

    def manner(self, is_last: bool) -> Manner:
        """How a stage is run.

        Args:
            is_last: Whether it is the last stage.
        """
        whole = self.activation_checkpointing
        again = whole == "full" or (whole == "except_last" and not is_last)
        return Manner(again, self.compile)

    @property
    def uncut(self) -> tuple[type[nn.Module], ...]:
        """Classes of modules that are not cut."""
        whole = self.activation_checkpointing
        return () if isinstance(whole, str) else whole


def recompute_of(
    chosen: Recompute | Sequence[type[nn.Module]],
) -> Recompute | tuple[type[nn.Module], ...]:
    """Checks the argument ``activation_checkpointing``.

    Raises:
        ValueError: If it is another word than the three, or an empty list.
        TypeError: If it lists what is no module class.
    """
    if isinstance(chosen, str):
        if chosen not in ("none", "full", "except_last"):
            raise ValueError(
                "activation_checkpointing must be 'none', 'full', 'except_last' or a list of "
                f"module classes, got {chosen!r}. For all stages say "
                "activation_checkpointing='full'."
            )
        return chosen
    classes = tuple(chosen)
    if not classes:
        raise ValueError(
            "activation_checkpointing must name at least one module class, got an empty list. For "
            "no recomputation say activation_checkpointing='none'."
        )
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(
                f"activation_checkpointing must list classes of modules, got {kind!r} among them. "
                "Give e.g. [torch.nn.TransformerEncoderLayer]."
            )
    return classes


def compile_of(chosen: bool | dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of ``torch.compile`` from the argument ``compile``; ``None`` for none.

    Raises:
        TypeError: If it is neither a bool nor a dict.
    """
    if isinstance(chosen, bool):
        return {} if chosen else None
    if not isinstance(chosen, dict):
        raise TypeError(
            "compile must be True, False or a dict with arguments of torch.compile, got "
            f"{chosen!r}. Give e.g. compile={{'mode': 'max-autotune'}}."
        )
    return dict(chosen)
