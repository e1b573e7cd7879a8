"""The timeline that an order of actions leads to, computed without running it.

Every rank works through its list in order and waits where an action needs a value that another
rank has not made yet:

    rank 0  0F0 0F1 ... ... 0B0---- 0F2 0B1---- ... 0B2----
    rank 1  ... 1F0 1B0---- 1F1 1B1---- 1F2 1B2---- ... ...

What is taken for granted: an action takes its time and nothing else slows it down; a message leaves
when its action ends, and computing goes on meanwhile; the messages from one rank to another pass
one after the other; a stage's gradients are reduced over the replicas beside the computation as
soon as all of them are there, one stage of a rank after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        recompute: Duration of what is computed again at the begin of ``B`` or ``I``.
        joint: What ``B`` takes less than ``I`` and ``W`` one by one.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float = 0.0
    joint: float = 0.0

    def of(self, op: str) -> float:
        """Returns the duration of one operation in seconds."""
        if op == "F":
            return self.forward
        if op == "W":
            return self.backward_weight
        rest = self.backward_weight - self.joint if op == "B" else 0.0
        return self.backward_input + rest + self.recompute


class StageBytes(NamedTuple):
    """What a stage keeps of one microbatch, in bytes.

    Attributes:
        activations: Held from the begin of ``F`` to the end of ``B`` or ``I``.
        deferred: Held from the end of ``I`` to the end of ``W``.
        recomputed: Held while ``B`` or ``I`` runs, besides.
    """

    activations: float
    deferred: float = 0
    recomputed: float = 0


class Link(NamedTuple):
    """The way of messages from one rank to another.

    A message occupies its direction of its pair of ranks for its bytes over the bandwidth and
    arrives one latency later; the next one waits until then for the first part alone.

    Attributes:
        latency: Time on the way, in seconds.
        bandwidth: Bytes a second.
        bytes: For each boundary between two stages, the size of the values of one microbatch that
            pass it; their gradients have the same. Empty: none has a size.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    bytes: Sequence[float] = ()


class Span(NamedTuple):
    """One action with its start and end in seconds."""

    action: Action
    start: float
    end: float


class Reduction(NamedTuple):
    """The reduction of a stage's gradients over the replicas, with start and end in seconds."""

    stage: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a pipeline runs.

    Attributes:
        spans: For each rank of the pipeline, its actions in order.
        reductions: For each rank, the reductions of its stages in order; empty if there are none.
    """

    spans: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Reduction, ...], ...] = ()

    @cached_property
    def makespan(self) -> float:
        """Time of a step: from the first start to the end of all, in seconds."""
        return max((end for _, end in self._extents), default=0.0)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the time of the step in which it computes nothing, in seconds."""
        return tuple(self.makespan - busy for busy in self._busy)

    @cached_property
    def bubble(self) -> float:
        """Share of the ranks' time that no action fills, 0 to 1."""
        total = len(self.spans) * self.makespan
        return 1.0 - sum(self._busy) / total if total else 0.0

    @cached_property
    def steady_bubble(self) -> float:
        """The bubble of steps in a row that no barrier parts, 0 to 1.

        A rank then begins its next step where it ends this one, and steps follow each other at the
        pace of the rank that takes longest from its first start to its last end.

        Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.3.
        """
        total = len(self.spans) * max((end - start for start, end in self._extents), default=0.0)
        return 1.0 - sum(self._busy) / total if total else 0.0

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @cached_property
    def _extents(self) -> tuple[tuple[float, float], ...]:
        """The first start and the last end of each rank that does anything."""
        reductions = self.reductions or ((),) * len(self.spans)
        return tuple(
            (row[0].start, max(row[-1].end, *(done.end for done in own)) if own else row[-1].end)
            for row, own in zip(self.spans, reductions, strict=True)
            if row
        )

    def peak_bytes(self, stages: Sequence[StageBytes]) -> tuple[float, ...]:
        """Returns the most bytes of activations that each rank holds at once.

        Args:
            stages: For each stage, what it keeps of one microbatch.
        """
        return tuple(peak_bytes((span.action for span in row), stages)[0] for row in self.spans)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most microbatches whose activations it holds at once.

        A microbatch counts once for each stage of the rank that holds it, from the forward to the
        end of the backward (of the weight gradients, where the backward is split).
        """
        return tuple(_peak_count([span.action for span in row]) for row in self.spans)

    @cached_property
    def peak_activations_of_stage(self) -> dict[int, int]:
        """For each stage, the most microbatches whose activations it holds at once."""
        by_stage: dict[int, list[Action]] = defaultdict(list)
        for row in self.spans:
            for span in row:
                by_stage[span.action.stage].append(span.action)
        return {stage: _peak_count(actions) for stage, actions in sorted(by_stage.items())}


def peak_bytes(
    actions: Iterable[Action], stages: Sequence[StageBytes], held: float = 0
) -> tuple[float, float]:
    """Returns the most bytes that a rank holds at once in a run of actions, and those at its end.

    Args:
        actions: What the rank computes, in order.
        stages: For each stage, what it keeps of one microbatch.
        held: The bytes at the begin.
    """
    peak = held
    for stage, op, _ in actions:
        activations, deferred, recomputed = stages[stage]
        if op == "F":
            held += activations
        elif op == "W":
            held -= deferred
        else:
            peak = max(peak, held + recomputed)
            held += (deferred if op == "I" else 0) - activations
        peak = max(peak, held)
    return peak, held


def _peak_count(actions: Sequence[Action]) -> int:
    num_stages = 1 + max((action.stage for action in actions), default=0)
    return int(peak_bytes(actions, [StageBytes(1, 1)] * num_stages)[0])


def simulate(
    actions: Sequence[Sequence[Action]],
    times: Sequence[StageTime],
    message: float | Link = 0.0,
    reductions: Sequence[float] | None = None,
) -> Timeline:
    """Computes when every action runs if each rank works through its list in order.

    Example:
        >>> lists = action_lists(get_schedule("1F1B"), ranks=4, stages_per_rank=1, microbatches=8)
        >>> round(simulate(lists, [StageTime(1, 1, 1)] * 4).bubble, 3)
        0.273

    Args:
        actions: For each rank of one pipeline, what it computes, in order.
        times: For each stage, its durations in seconds.
        message: What a message to another rank passes through; a number is a latency in seconds.
        reductions: For each stage, the time that the reduction of its gradients over the replicas
            takes, in seconds; ``None`` is none.

    Returns:
        The timeline.

    Raises:
        Deadlock: If ranks wait for each other or for an action that is in no list; a ValueError.
    """
    spans = _simulate(actions, lambda a: times[a.stage].of(a.op), len(times), message)
    return Timeline(spans, () if reductions is None else _reduce(spans, reductions))


def simulate_measured(
    actions: Sequence[Sequence[Action]],
    seconds: Mapping[Action, float],
    message: float | Link = 0.0,
) -> Timeline:
    """Computes when every action runs, from a duration of its own for each.

    Args:
        actions: As for `simulate`.
        seconds: The duration of every action, in seconds.
        message: As for `simulate`.

    Raises:
        Deadlock: If ranks wait for each other or for an action that is in no list; a ValueError.
    """
    num_stages = 1 + max(action.stage for row in actions for action in row)
    return Timeline(_simulate(actions, seconds.__getitem__, num_stages, message))


class Wires:
    """When messages arrive.

    Args:
        actions: For each rank, what it computes.
        num_stages: Number of stages.
        message: As for `simulate`.
    """

    def __init__(
        self, actions: Sequence[Sequence[Action]], num_stages: int, message: float | Link
    ) -> None:
        link = message if isinstance(message, Link) else Link(message)
        self._rank_of = {a.stage: rank for rank, row in enumerate(actions) for a in row}
        self._latency = link.latency
        sizes = link.bytes or [0.0] * (num_stages - 1)
        self._passing = [size / link.bandwidth for size in sizes]
        self._free: dict[tuple[int, int], float] = defaultdict(float)

    def arrival(self, action: Action, rank: int, end: float) -> float:
        """When the neighbouring stage has what an action made; called in each rank's order."""
        stage, op, _ = action
        to = stage + 1 if op == "F" else stage - 1
        receiver = self._rank_of.get(to, rank)
        if op == "W" or receiver == rank:
            return end
        way = rank, receiver
        self._free[way] = sent = max(end, self._free[way]) + self._passing[min(stage, to)]
        return sent + self._latency


def _simulate(
    actions: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    num_stages: int,
    message: float | Link,
) -> tuple[tuple[Span, ...], ...]:
    wires = Wires(actions, num_stages, message)
    ready: dict[_Value, float] = {}  # when it is where the neighbouring stage is
    waiting: dict[_Value, list[int]] = defaultdict(list)
    spans: list[list[Span]] = [[] for _ in actions]
    runnable = list(range(len(actions)))
    while runnable:
        rank = runnable.pop()
        row, done = actions[rank], spans[rank]
        now = done[-1].end if done else 0.0
        while len(done) < len(row):
            action = row[len(done)]
            needed = needs(action, num_stages)
            missing = next((value for value in needed if value not in ready), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            # What the stage itself has made stands before it in the rank's list.
            start = max([now, *(ready[value] for value in needed if value[0] != action.stage)])
            now = start + seconds(action)
            done.append(Span(action, start, now))
            made = makes(action)
            ready[made] = wires.arrival(action, rank, now)
            runnable += waiting.pop(made, [])
    if waiting:
        raise _deadlock(actions, spans, waiting)
    return tuple(map(tuple, spans))


def _reduce(
    spans: Sequence[Sequence[Span]], seconds: Sequence[float]
) -> tuple[tuple[Reduction, ...], ...]:
    rows = []
    for row in spans:
        complete = {span.action.stage: span.end for span in row if span.action.op in "BW"}
        done: list[Reduction] = []
        for end, stage in sorted((end, stage) for stage, end in complete.items()):
            start = max(end, done[-1].end) if done else end
            done.append(Reduction(stage, start, start + seconds[stage]))
        rows.append(tuple(done))
    return tuple(rows)


def needs(action: Action, num_stages: int) -> list[_Value]:
    """The values that must exist before an action starts."""
    stage, op, m = action
    if op == "F":
        return [(stage - 1, "F", m)] if stage > 0 else []
    if op == "W":
        return [(stage, "B", m)]
    own = (stage, "F", m)
    return [own] if stage == num_stages - 1 else [own, (stage + 1, "B", m)]


def makes(action: Action) -> _Value:
    """The value that exists when an action has ended; ``B`` and ``I`` both give the gradient."""
    stage, op, m = action
    return (stage, "B" if op == "I" else op, m)


class Deadlock(ValueError):
    """Ranks wait for each other, or for an action that is in no list.

    Attributes:
        stuck: For each rank that waits, the action that it stands at and those of which one would
            let it go on.
    """

    def __init__(self, stuck: Sequence[tuple[Action, Sequence[Action]]], text: str) -> None:
        super().__init__(text)
        self.stuck = stuck


def _deadlock(
    actions: Sequence[Sequence[Action]],
    spans: Sequence[Sequence[Span]],
    waiting: dict[_Value, list[int]],
) -> Deadlock:
    stuck, words = [], []
    for (stage, op, m), ranks in sorted(waiting.items()):
        options = [Action(stage, "F", m)]
        if op == "B":
            options = [Action(stage, "B", m), Action(stage, "I", m)]
        for rank in ranks:
            action = actions[rank][len(spans[rank])]
            stuck.append((action, options))
            either = " or ".join(map(str, options))
            words.append(f"rank {rank} stands at {action} and waits for {either}")
    done, total = sum(map(len, spans)), sum(map(len, actions))
    return Deadlock(
        stuck,
        f"Every action must come after those that it needs, got stuck after {done} of {total} "
        f"actions: {'; '.join(words)}. The order comes from the action lists of the "
        f"{len(actions)} ranks. Reorder them, or take a list that action_lists() returns.",
    )
