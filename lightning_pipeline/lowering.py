"""What each rank of a pipeline does, its messages included.

A message leaves right behind the action that makes it. Its receiver begins to wait for it, without
stopping, where it stands by the clock of a run in which every action takes its usual time; so all
ranks list the messages between two of them in one order, which NCCL pairs them by, and none waits
in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_pipeline.actions import Action
from lightning_pipeline.simulate import StageTime, simulate

Kind = Literal["F", "B"]
"""Values of a forward for the next stage, or gradients for the one before."""


class Transfer(NamedTuple):
    """One message of one rank.

    Attributes:
        sends: Whether the rank sends it; it receives it otherwise.
        kind: What it carries.
        stage: The stage that it goes to.
        microbatch: Index of the microbatch.
        peer: Rank of the pipeline at the other end.
    """

    sends: bool
    kind: Kind
    stage: int
    microbatch: int
    peer: int


def lower(lists: Sequence[Sequence[Action]], num_stages: int) -> list[list[Action | Transfer]]:
    """Puts the messages into the lists of all ranks.

    Args:
        lists: What each rank of the pipeline computes, in order.
        num_stages: Number of stages.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    lowered: list[list[Action | Transfer]] = [[] for _ in lists]
    timeline = simulate(lists, [StageTime(1, 1, 1)] * num_stages)
    ends = [
        (span.end, rank, span.action) for rank, row in enumerate(timeline.spans) for span in row
    ]
    for _, rank, action in sorted(ends):
        lowered[rank].append(action)
        if action.op == "W":
            continue
        kind: Kind = "F" if action.op == "F" else "B"
        to = action.stage + (1 if kind == "F" else -1)
        if not 0 <= to < num_stages or rank_of[to] == rank:
            continue
        lowered[rank].append(Transfer(True, kind, to, action.microbatch, rank_of[to]))
        lowered[rank_of[to]].append(Transfer(False, kind, to, action.microbatch, rank))
    return lowered


def receive_early(steps: Sequence[Action | Transfer]) -> list[Action | Transfer]:
    """Begins to receive one action earlier, for transports that pair messages by their tags.

    Where the room for a message is there before it is sent, it comes at once; otherwise both ends
    have to agree first, which wakes the thread of the transport on each of them once more.

    Args:
        steps: What one rank does, as `lower` gives it.
    """
    early: list[Action | Transfer] = []
    for step in steps:
        at = len(early)
        if isinstance(step, Transfer) and not step.sends:
            actions = (i for i in reversed(range(at)) if isinstance(early[i], Action))
            at = next(actions, at)
        early.insert(at, step)
    return early
