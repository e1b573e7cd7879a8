"""What each rank of a pipeline does, in order: action lists by definition, or torch's own.

One action is one computation on one microbatch, written ``<stage><op><microbatch>``: ``0F3`` is
the forward of microbatch 3 on stage 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from lightning_pipeline.schedules import Schedule

Op = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of one stage on one microbatch.

    Attributes:
        stage: Index of the stage.
        op: ``F`` forward, ``B`` the whole backward, ``I`` the gradient of the stage's inputs,
            ``W`` the gradient of its weights.
        microbatch: Index of the microbatch.
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def action_lists(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> list[list[Action]]:
    """Returns what each rank of one pipeline computes, in order.

    Example:
        >>> lists = action_lists(get_schedule("1F1B"), ranks=2, stages_per_rank=1, microbatches=2)
        >>> [" ".join(map(str, actions)) for actions in lists]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Args:
        schedule: The schedule.
        ranks: Number of ranks in one pipeline.
        stages_per_rank: Number of stages that each rank holds.
        microbatches: Number of microbatches in a step.

    Returns:
        One list for each rank of the pipeline, as torch numbers the ranks.

    Raises:
        ValueError: If the schedule can't run with these sizes.
    """
    schedule.check(ranks, stages_per_rank, microbatches)
    if schedule.order is not None:
        return schedule.order(ranks, stages_per_rank, microbatches)
    return _torch_lists(schedule, ranks, stages_per_rank, microbatches)


def _torch_lists(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> list[list[Action]]:
    """Torch's order of a schedule, without its processes.

    The only place in this module that knows private names of torch. Tested with torch 2.13.
    """
    from types import SimpleNamespace

    from torch.distributed.pipelining.schedules import get_schedule_class

    # The constructors compute the order of every rank and read no more of a stage than this.
    size = {"group_rank": 0, "group_size": ranks, "num_stages": ranks * stages_per_rank}
    stages = [SimpleNamespace(**size, submod=None) for _ in range(stages_per_rank)]
    order = get_schedule_class(schedule.name)(stages, microbatches).pipeline_order

    def flatten(entry: Any) -> Iterator[Action]:
        if entry is None:
            return
        if entry.sub_actions is not None:
            # An overlapped pair runs as a forward followed by a backward.
            for part in entry.sub_actions:
                yield from flatten(part)
        else:
            yield Action(entry.stage_index, entry.computation_type.value, entry.microbatch_index)

    return [[action for entry in order[rank] for action in flatten(entry)] for rank in range(ranks)]
