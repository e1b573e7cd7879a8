"""The user's choices that do not depend on the model, as checked values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_pipeline.schedules import (
    AUTO,
    SCHEDULES,
    Auto,
    Schedule,
    get_schedule,
    require_count,
)
from lightning_pipeline.steps import Manner, PartitionSpec

Recompute = Literal["none", "full", "except_last"]
BalanceBy = Literal["cost", "time"]


class Open(NamedTuple):
    """What ``schedule="auto"`` leaves to the first batch, as far as it is not given.

    Attributes:
        stages_per_rank: Stages that each rank holds.
        num_microbatches: Microbatches of a batch.
    """

    stages_per_rank: int | Auto
    num_microbatches: int | Auto


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
        balance_by: Whether the model is cut by what its pieces cost, or by their measured time.
        open: What the first batch decides, if it does; schedule and stages are provisional then.
        validates: Whether the first training step is compared with an unpipelined one.
        notes: Sentences for the plan.
    """

    schedule: Schedule
    stages_per_rank: int
    num_microbatches: int | Auto
    partition: PartitionSpec
    module: str | None
    activation_checkpointing: Recompute | tuple[type[nn.Module], ...] = "none"
    compile: dict[str, Any] | None = None
    deferred_batch_norm: bool = False
    balance_by: BalanceBy = "cost"
    open: Open | None = None
    validates: bool = False
    notes: tuple[str, ...] = ()

    def check(self, ranks: int) -> None:
        """Checks the schedule for a number of ranks in one pipeline.

        Raises:
            ValueError: If it can't run with these sizes.
        """
        self.schedule.check(ranks, self.stages_per_rank, self.num_microbatches)

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


def options_of(
    schedule: str,
    stages_per_rank: int | Auto,
    num_microbatches: int | Auto,
    partition: PartitionSpec,
    module: str | None,
    activation_checkpointing: Recompute | Sequence[type[nn.Module]],
    compile: bool | dict[str, Any],
    deferred_batch_norm: bool,
    balance_by: str,
    validate: str | None = None,
) -> Options:
    """Checks the arguments of the same names of ``PipelineStrategy``.

    Raises:
        ValueError: If one is none of the values that it may have.
        TypeError: If one is of another type.
    """
    if num_microbatches != "auto":
        require_count("num_microbatches", num_microbatches)
    chosen, depth, left = schedule_of(schedule, stages_per_rank, num_microbatches)
    return Options(
        chosen,
        depth,
        num_microbatches,
        partition if isinstance(partition, str) else tuple(partition),
        module,
        recompute_of(activation_checkpointing),
        compile_of(compile),
        deferred_batch_norm,
        balance_of(balance_by),
        left,
        validates_of(validate),
    )


def schedule_of(
    name: str, stages_per_rank: int | Auto, num_microbatches: int | Auto
) -> tuple[Schedule, int, Open | None]:
    """The schedule of a name, the stages on each rank, and what the first batch decides.

    Until then ``"auto"`` is a schedule that any number of ranks and microbatches goes with.

    Raises:
        ValueError: If there is no such schedule, or it does not go with the stages.
    """
    if str(name).lower() != AUTO:
        chosen = get_schedule(name)
        return chosen, chosen.resolve_stages_per_rank(stages_per_rank), None
    if stages_per_rank != "auto":
        require_count("stages_per_rank", stages_per_rank)
    free = next(s for s in SCHEDULES if s.is_single and not s.at_least_stages)
    return free, 1, Open(stages_per_rank, num_microbatches)


def balance_of(chosen: str) -> BalanceBy:
    """Checks the argument ``balance_by``.

    Raises:
        ValueError: If it is another word than the two.
    """
    if chosen not in ("cost", "time"):
        raise ValueError(
            f"balance_by must be 'cost' or 'time', got {chosen!r}. Set balance_by='cost' for what "
            "the recorded operations cost, or balance_by='time' for what their modules take."
        )
    return chosen  # type: ignore[return-value]


def validates_of(chosen: str | None) -> bool:
    """Whether the argument ``validate`` asks for a comparison of the first step.

    Raises:
        ValueError: If it is neither ``None`` nor ``"first_step"``.
    """
    if chosen not in (None, "first_step"):
        raise ValueError(
            f"validate must be None or 'first_step', got {chosen!r}. Set validate='first_step' to "
            "compare the first training step with an unpipelined one."
        )
    return chosen is not None


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
