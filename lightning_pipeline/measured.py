"""What did happen in a step: spans, key figures, and the prediction from the same durations."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from lightning_pipeline.actions import Action
from lightning_pipeline.activities import Activity, Mark, Wait
from lightning_pipeline.clocks import Offset
from lightning_pipeline.lowering import Transfer
from lightning_pipeline.simulate import Span, Timeline, simulate_measured

Message: TypeAlias = tuple[str, int, int]
"""``"F"`` for values and ``"B"`` for gradients, the stage that it goes to, the microbatch."""


class RankRecord(NamedTuple):
    """What one rank has noted of a step.

    Attributes:
        rank: Global rank.
        pipeline_rank: Rank inside its pipeline.
        data_rank: Index of the replica.
        offset: What is to be added to its clock.
        marks: What it did, in order.
    """

    rank: int
    pipeline_rank: int
    data_rank: int
    offset: Offset
    marks: list[Mark]


class Piece(NamedTuple):
    """An activity with its start and end in seconds, on global rank 0's clock."""

    activity: Activity
    start: float
    end: float


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was recorded.

    Attributes:
        step: Number of optimizer steps before it.
        measured: When the actions of global rank 0's pipeline ran.
        predicted: When they would have run if every action took the mean time of its kind and
            stage, and every message the median time of those that were waited for.
        metrics: Key figures of all pipelines, by the names that loggers get; times in seconds.
        accuracy: By how much the clocks of two ranks may be apart, in seconds.
    """

    step: int
    measured: Timeline
    predicted: Timeline
    metrics: dict[str, float]
    accuracy: float


class MeasuredPipeline:
    """The ranks of one pipeline in one step.

    Args:
        records: What they have noted, by pipeline rank.

    Attributes:
        records: The same.
        rows: For each rank, what it did, in order. A backward that was run in two parts is an ``I``
            and a ``W``.
    """

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self.records = records
        self.rows = [_pieces(record) for record in records]

    @cached_property
    def spans(self) -> list[list[Span]]:
        """For each rank the computing of its actions, behind the wait for what they need."""
        rows = []
        for row in self.rows:
            found = {a: Span(a, start, end) for a, start, end in row if isinstance(a, Action)}
            rows.append(list(found.values()))
        return rows

    @cached_property
    def timeline(self) -> Timeline:
        """The same from the first start on."""
        start = min(row[0].start for row in self.spans)
        rows = ([Span(a, s - start, e - start) for a, s, e in row] for row in self.spans)
        return Timeline(tuple(map(tuple, rows)))

    @cached_property
    def sent(self) -> dict[Message, tuple[int, float]]:
        """For each message the rank that sends it and when it does."""
        return {
            message_of(activity): (rank, start)
            for rank, row in enumerate(self.rows)
            for activity, start, _ in row
            if isinstance(activity, Transfer) and activity.sends
        }

    @cached_property
    def _busy(self) -> dict[Action, tuple[float, float]]:
        """For each action the time that its rank has for nothing else, and when that ends.

        Messages are sent, and room for others is made, by the rank itself.
        """
        found: dict[Action, tuple[float, float]] = {}
        for row in self.rows:
            action = None
            for activity, start, end in row:
                if isinstance(activity, Action):
                    action = activity
                if action is not None and isinstance(activity, (Action, Transfer)):
                    found[action] = found.get(action, (0.0, 0.0))[0] + end - start, end
        return found

    @cached_property
    def predicted(self) -> Timeline:
        """The timeline that the order of the actions leads to, with their mean durations.

        Not the median: a timeline adds durations up, and those of a rank have the same sum so.
        """
        lists = [[span.action for span in row] for row in self.spans]
        busy = ((action, seconds) for action, (seconds, _) in self._busy.items())
        seconds = {kind: statistics.mean(values) for kind, values in _by_kind(busy).items()}
        return simulate_measured(
            lists, {a: seconds[a.stage, a.op] for row in lists for a in row}, self.message
        )

    @cached_property
    def message(self) -> float:
        """Median time from the end of an action to the arrival of its result, in seconds.

        Known of the messages that were waited for; 0 if none was.
        """
        makers = {_made(action): end for action, (_, end) in self._busy.items()}
        late = []
        for row in self.rows:
            for activity, start, end in row:
                if isinstance(activity, Wait) and activity.kind != "batch":
                    made = makers[message_of(activity)]
                    if start < made:
                        late.append(end - made)
        return max(0.0, statistics.median(late)) if late else 0.0

    def idle(self, rank: int) -> float:
        """Seconds of the pass in which a rank computes no action."""
        return self.timeline.makespan - sum(end - start for _, start, end in self.spans[rank])

    def waiting(self, rank: int) -> float:
        """Seconds in which a rank waits for a message, the other ranks' batch, or the exchange."""
        return sum(end - start for a, start, end in self.rows[rank] if _is_waiting(a))

    def exposed(self, rank: int) -> float:
        """Seconds of that in which the message was on its way already, or the exchange went on."""
        total = 0.0
        for activity, start, end in self.rows[rank]:
            if activity == "exchange ends":
                total += end - start
            elif isinstance(activity, Wait) and activity.kind != "batch":
                total += max(0.0, end - max(start, self.sent[message_of(activity)][1]))
        return total


def measure(
    step: int, records: Sequence[RankRecord]
) -> tuple[MeasuredStep, list[MeasuredPipeline]]:
    """Joins what all ranks have noted of a step.

    Args:
        step: Number of optimizer steps before it.
        records: One for each rank, in any order.

    Returns:
        The step, and its pipelines, that of global rank 0 first.
    """
    replicas: dict[int, list[RankRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.data_rank, record.pipeline_rank)):
        replicas[record.data_rank].append(record)
    pipelines = [MeasuredPipeline(replica) for replica in replicas.values()]
    first = pipelines[0]
    accuracy = 2 * max(record.offset.accuracy for record in records)
    metrics = _metrics(pipelines)
    return MeasuredStep(step, first.timeline, first.predicted, metrics, accuracy), pipelines


def _by_kind(durations: Iterable[tuple[Action, float]]) -> dict[tuple[int, str], list[float]]:
    """The durations of each kind of action on each stage."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for action, duration in durations:
        found[action.stage, action.op].append(duration)
    return dict(sorted(found.items()))


def _metrics(pipelines: Sequence[MeasuredPipeline]) -> dict[str, float]:
    steps = [r.marks[-1][0] - r.marks[0][0] for p in pipelines for r in p.records]
    found = {
        "bubble": statistics.mean(pipeline.timeline.bubble for pipeline in pipelines),
        "step_seconds": max(steps),
        "pass_seconds": max(pipeline.timeline.makespan for pipeline in pipelines),
        "predicted_pass_seconds": max(pipeline.predicted.makespan for pipeline in pipelines),
        "message_seconds": statistics.mean(pipeline.message for pipeline in pipelines),
    }
    ranks = [(r.rank, p, i) for p in pipelines for i, r in enumerate(p.records)]
    for rank, pipeline, index in sorted(ranks, key=lambda entry: entry[0]):
        found[f"idle_rank_{rank}"] = pipeline.idle(index)
        found[f"waiting_rank_{rank}"] = pipeline.waiting(index)
        found[f"exposed_rank_{rank}"] = pipeline.exposed(index)
    spans = (span for pipeline in pipelines for row in pipeline.spans for span in row)
    for (stage, op), values in _by_kind((a, end - start) for a, start, end in spans).items():
        found[f"stage_{stage}_{op}"] = statistics.median(values)
    return {f"pipeline/{name}": value for name, value in found.items()}


def _pieces(record: RankRecord) -> list[Piece]:
    shift, marks = record.offset.seconds, record.marks
    late = {a[::2] for _, a in marks if isinstance(a, Action) and a.op == "W"}
    row = []
    for (start, activity), (end, _) in pairwise(marks):
        if isinstance(activity, Action) and activity.op == "B" and activity[::2] in late:
            activity = activity._replace(op="I")
        row.append(Piece(activity, start + shift, end + shift))
    return row


def _is_waiting(activity: Activity) -> bool:
    return isinstance(activity, Wait) or activity == "exchange ends"


def message_of(activity: Transfer | Wait) -> Message:
    """The message that is sent or waited for."""
    return activity.kind, activity.stage, activity.microbatch


def _made(action: Action) -> Message:
    """The message that an action makes, if it goes to another rank."""
    stage, op, microbatch = action
    if op == "F":
        return "F", stage + 1, microbatch
    return ("W" if op == "W" else "B"), stage - 1, microbatch
