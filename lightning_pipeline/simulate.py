"""The timeline that an order of actions leads to, computed without running it.

Every rank works through its list in order and waits where an action needs a value that another
rank has not made yet:

    rank 0  0F0 0F1 ... ... 0B0---- 0F2 0B1---- ... 0B2----
    rank 1  ... 1F0 1B0---- 1F1 1B1---- 1F2 1B2---- ... ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_pipeline.actions import Action

# What an action makes for others: (stage, "F") is an output, (stage, "B") a gradient of inputs.
_Value = tuple[int, str, int]


class StageTime(NamedTuple):
    """How long one microbatch takes on one stage, in seconds.

    Attributes:
        forward: Duration of ``F``.
        backward_input: Duration of ``I``.
        backward_weight: Duration of ``W``; a whole backward ``B`` takes ``I`` plus ``W``.
    """

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, op: str) -> float:
        """Returns the duration of one operation in seconds."""
        if op == "B":
            return self.backward_input + self.backward_weight
        return self["FIW".index(op)]


class Span(NamedTuple):
    """One action with its start and end in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a pipeline runs.

    Attributes:
        spans: For each rank of the pipeline, its actions in order.
    """

    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end, in seconds."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Share of the ranks' time that no action fills, 0 to 1."""
        total = len(self.spans) * self.makespan
        work = sum(end - start for row in self.spans for _, start, end in row)
        return 1.0 - work / total if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most microbatches whose activations it holds at once.

        A microbatch counts once for each stage of the rank that holds it, from the forward to the
        end of the backward (of the weight gradients, where the backward is split).
        """
        return tuple(_peak([span.action for span in row]) for row in self.spans)

    @cached_property
    def peak_activations_of_stage(self) -> dict[int, int]:
        """For each stage, the most microbatches whose activations it holds at once."""
        by_stage: dict[int, list[Action]] = defaultdict(list)
        for row in self.spans:
            for span in row:
                by_stage[span.action.stage].append(span.action)
        return {stage: _peak(actions) for stage, actions in sorted(by_stage.items())}


def _peak(actions: Sequence[Action]) -> int:
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.op]
        peak = max(peak, held)
    return peak


def simulate(
    actions: Sequence[Sequence[Action]], times: Sequence[StageTime], message: float = 0.0
) -> Timeline:
    """Computes when every action runs if each rank works through its list in order.

    Example:
        >>> lists = action_lists(get_schedule("1F1B"), ranks=4, stages_per_rank=1, microbatches=8)
        >>> round(simulate(lists, [StageTime(1, 1, 1)] * 4).bubble, 3)
        0.273

    Args:
        actions: For each rank of one pipeline, what it computes, in order.
        times: For each stage, its durations in seconds.
        message: Time between the end of an action and the arrival of its result on another rank,
            in seconds; it passes while both ranks go on with their work.

    Returns:
        The timeline.

    Raises:
        ValueError: If ranks wait for each other or for an action that is in no list.
    """
    return _simulate(actions, lambda a: times[a.stage].of(a.op), len(times), message)


def simulate_measured(
    actions: Sequence[Sequence[Action]], seconds: Mapping[Action, float], message: float = 0.0
) -> Timeline:
    """Computes when every action runs, from a duration of its own for each.

    Args:
        actions: As for `simulate`.
        seconds: The duration of every action, in seconds.
        message: As for `simulate`.

    Raises:
        ValueError: If ranks wait for each other or for an action that is in no list.
    """
    num_stages = 1 + max(action.stage for row in actions for action in row)
    return _simulate(actions, seconds.__getitem__, num_stages, message)


def _simulate(
    actions: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    num_stages: int,
    message: float,
) -> Timeline:
    rank_of = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    ready: dict[_Value, float] = {}
    waiting: dict[_Value, list[int]] = defaultdict(list)
    spans: list[list[Span]] = [[] for _ in actions]
    runnable = list(range(len(actions)))
    while runnable:
        rank = runnable.pop()
        row = actions[rank]
        while len(spans[rank]) < len(row):
            action = row[len(spans[rank])]
            needs = _needs(action, num_stages)
            missing = next((value for value in needs if value not in ready), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0.0
            for value in needs:
                late = message if rank_of[value[0]] != rank else 0.0
                start = max(start, ready[value] + late)
            end = start + seconds(action)
            spans[rank].append(Span(action, start, end))
            made = _makes(action)
            ready[made] = end
            runnable += waiting.pop(made, [])
    if waiting:
        raise ValueError(_deadlock(actions, spans, waiting))
    return Timeline(tuple(map(tuple, spans)))


def _needs(action: Action, num_stages: int) -> list[_Value]:
    """The values that must exist before an action starts."""
    stage, op, m = action
    if op == "F":
        return [(stage - 1, "F", m)] if stage > 0 else []
    if op == "W":
        return [(stage, "B", m)]
    own = (stage, "F", m)
    return [own] if stage == num_stages - 1 else [own, (stage + 1, "B", m)]


def _makes(action: Action) -> _Value:
    """The value that exists when an action has ended; ``B`` and ``I`` both give the gradient."""
    stage, op, m = action
    return (stage, "B" if op == "I" else op, m)


def _deadlock(
    actions: Sequence[Sequence[Action]],
    spans: Sequence[Sequence[Span]],
    waiting: dict[_Value, list[int]],
) -> str:
    stuck = "; ".join(
        f"rank {rank} stands at {actions[rank][len(spans[rank])]} and waits for "
        f"{stage}{op}{m}" + ("" if op == "F" else f" or {stage}I{m}")
        for (stage, op, m), ranks in sorted(waiting.items())
        for rank in ranks
    )
    done, total = sum(map(len, spans)), sum(map(len, actions))
    return (
        f"Every action must come after those that it needs, got stuck after {done} of {total} "
        f"actions: {stuck}. The order comes from the action lists of the {len(actions)} ranks. "
        "Reorder them, or take a list that action_lists() returns."
    )
