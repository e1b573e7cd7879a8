"""A recorded step as a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Source of the format: Trace Event Format, Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_pipeline.actions import Action
from lightning_pipeline.activities import Wait
from lightning_pipeline.lowering import Transfer
from lightning_pipeline.measured import MeasuredPipeline, MeasuredStep, Message, Piece, message_of

_COMPUTING, _MESSAGES, _REDUCTION = range(3)
_ROWS = ("computing", "messages", "reduction")

_Event = dict[str, Any]


def chrome_trace(step: MeasuredStep, pipelines: Sequence[MeasuredPipeline]) -> dict[str, Any]:
    """The trace of all ranks, ready for `json.dump`.

    A rank is a process with three rows, and each message an arrow from where it is sent to where it
    is used. Times are microseconds from the first rank's begin of the step.

    Args:
        step: The step.
        pipelines: Its pipelines.
    """
    start = min(row[0].start for pipeline in pipelines for row in pipeline.rows)
    events = [event for p in pipelines for event in _events(p, start)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": step.step, "clock_accuracy": step.accuracy, **step.metrics},
    }


def _events(pipeline: MeasuredPipeline, start: float) -> Iterator[_Event]:
    ranks = [record.rank for record in pipeline.records]
    for record, row in zip(pipeline.records, pipeline.rows, strict=True):
        yield from _names(record.rank, record.data_rank * len(ranks) + record.pipeline_rank, row)
        for piece in row:
            label = _label(piece)
            if label is not None:
                number, name = label
                yield {
                    "ph": "X",
                    **_place(record.rank, number),
                    "name": name,
                    "cat": _ROWS[number],
                    "ts": _microseconds(piece.start - start),
                    "dur": _microseconds(piece.end - piece.start),
                }
    yield from _arrows(pipeline, start)


def _names(rank: int, position: int, row: Sequence[Piece]) -> Iterator[_Event]:
    stages = sorted({p.activity.stage for p in row if isinstance(p.activity, Action)})
    label = f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
    yield _metadata(rank, 0, "process_name", name=label)
    yield _metadata(rank, 0, "process_sort_index", sort_index=position)
    for tid, name in enumerate(_ROWS):
        yield _metadata(rank, tid, "thread_name", name=name)


def _metadata(rank: int, row: int, what: str, **args: Any) -> _Event:
    return {"ph": "M", **_place(rank, row), "name": what, "args": args}


def _label(piece: Piece) -> tuple[int, str] | None:
    """The row of a piece and its name; ``None`` for what is not drawn."""
    activity = piece.activity
    if isinstance(activity, Action):
        return _COMPUTING, str(activity)
    if isinstance(activity, (Transfer, Wait)):
        name = "all ranks" if activity.kind == "batch" else _name(message_of(activity))
        does = "send" if isinstance(activity, Transfer) else "wait for"
        if isinstance(activity, Transfer) and not activity.sends:
            does = "post receive of"
        return _MESSAGES, f"{does} {name}"
    if activity == "optimizer":
        return _COMPUTING, activity
    return None if activity == "else" else (_REDUCTION, activity)


def _arrows(pipeline: MeasuredPipeline, start: float) -> Iterator[_Event]:
    ranks = [record.rank for record in pipeline.records]
    used: dict[Message, tuple[int, float]] = {
        ("F" if span.action.op == "F" else "B", *span.action[::2]): (rank, span.start)
        for rank, row in zip(ranks, pipeline.spans, strict=True)
        for span in row
        if span.action.op != "W"
    }
    for message, (sender, sent) in pipeline.sent.items():
        arrow = {"name": _name(message), "cat": "message", "id": f"{ranks[0]}:{_name(message)}"}
        out = {"ph": "s", **_place(ranks[sender], _MESSAGES), "ts": _microseconds(sent - start)}
        yield {**arrow, **out}
        to, at = used[message]
        into = {"ph": "f", "bp": "e", **_place(to, _COMPUTING), "ts": _microseconds(at - start)}
        yield {**arrow, **into}


def _name(message: Message) -> str:
    """The action that uses it; a gradient is that of a whole backward."""
    kind, stage, microbatch = message
    return f"{stage}{kind}{microbatch}"


def _place(rank: int, row: int) -> dict[str, int]:
    return {"pid": rank, "tid": row}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
