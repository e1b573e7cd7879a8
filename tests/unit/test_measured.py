"""Recorded steps: key figures and traces of made-up ranks, clocks, and what is refused."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_pipeline import PipelineTimeline
from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.activities import EventRecorder, Mark, Recorder, Wait, make_recorder
from lightning_pipeline.clocks import Offset
from lightning_pipeline.draw import draw_svg
from lightning_pipeline.lowering import Transfer
from lightning_pipeline.measured import RankRecord, measure
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.trace import chrome_trace


def first_rank(start: float, late: float = 0.0) -> list[Mark]:
    """Stage 0 of two, one microbatch, in whole seconds from ``start`` on."""
    marks: list[Mark] = [
        (0, "else"),
        (1, Action(0, "F", 0)),
        (3, Wait("batch")),
        (3, Transfer(True, "F", 1, 0, 1)),
        (3, Transfer(False, "B", 0, 0, 1)),
        (3, Action(0, "B", 0)),
        (3, Wait("B", 0, 0)),
        (9 + late, Action(0, "B", 0)),
        (13 + late, "exchange begins"),
        (13 + late, "else"),
        (14 + late, "exchange ends"),
        (16 + late, "else"),
        (17 + late, "optimizer"),
        (20 + late, "else"),
    ]
    return [(start + moment, activity) for moment, activity in marks]


def last_rank(start: float) -> list[Mark]:
    """Stage 1, which waits for a message that takes a second, and splits its backward."""
    marks: list[Mark] = [
        (0, "else"),
        (1, Wait("batch")),
        (2, Transfer(False, "F", 1, 0, 0)),
        (2, Action(1, "F", 0)),
        (2, Wait("F", 1, 0)),
        (4, Action(1, "F", 0)),
        (6, Action(1, "B", 0)),
        (8, Transfer(True, "B", 0, 0, 0)),
        (8, Action(1, "W", 0)),
        (11, "exchange begins"),
        (11, "else"),
        (20, "else"),
    ]
    return [(start + moment, activity) for moment, activity in marks]


def records(late: float = 0.0) -> list[RankRecord]:
    """Two ranks, whose clocks are 70 s apart; global rank 0 holds the last stage."""
    return [
        RankRecord(0, 1, 0, Offset(0.0, 0.0), last_rank(100)),
        RankRecord(1, 0, 0, Offset(70.0, 0.25), first_rank(30, late)),
    ]


def test_figures_of_one_pipeline() -> None:
    step, _ = measure(7, records())
    assert step.step == 7
    assert [[(str(a), s, e) for a, s, e in row] for row in step.measured.spans] == [
        [("0F0", 0, 2), ("0B0", 8, 12)],
        [("1F0", 3, 5), ("1I0", 5, 7), ("1W0", 7, 10)],
    ]
    assert step.accuracy == 0.5
    assert step.metrics == {
        "pipeline/bubble": pytest.approx(1 - 13 / 24),
        "pipeline/step_seconds": 20,
        "pipeline/pass_seconds": 12,
        "pipeline/predicted_pass_seconds": 12,
        "pipeline/message_seconds": 1,
        "pipeline/idle_rank_0": 5,
        "pipeline/waiting_rank_0": 3,  # for the batch and for the values
        "pipeline/exposed_rank_0": 1,  # the values were on their way for one of the two
        "pipeline/idle_rank_1": 6,
        "pipeline/waiting_rank_1": 8,  # for the gradient and for the exchange
        "pipeline/exposed_rank_1": 3,
        "pipeline/stage_0_B": 4,
        "pipeline/stage_0_F": 2,
        "pipeline/stage_1_F": 2,
        "pipeline/stage_1_I": 2,
        "pipeline/stage_1_W": 3,
    }
    assert [row[-1].end for row in step.predicted.spans] == [12, 10]


def test_figures_of_replicas_are_those_of_all() -> None:
    late = [r._replace(rank=r.rank * 2 + 1, data_rank=1) for r in records(late=6.0)]
    step, pipelines = measure(0, [*late, *[r._replace(rank=r.rank * 2) for r in records()]])
    assert [[r.rank for r in p.records] for p in pipelines] == [[2, 0], [3, 1]]
    assert step.measured.makespan == 12
    assert step.metrics["pipeline/pass_seconds"] == 18
    assert step.metrics["pipeline/bubble"] == pytest.approx((1 - 13 / 24 + 1 - 13 / 36) / 2)
    names = [name for name in step.metrics if "idle" in name]
    assert [step.metrics[name] for name in names] == [5, 11, 6, 12]
    assert [name[-1] for name in names] == list("0123")


def test_an_action_takes_its_mean_time_in_the_prediction() -> None:
    marks: list[Mark] = [(0, "else")]
    lists = action_lists(get_schedule("1F1B"), 1, 1, 4)
    moment = 1.0
    for action in lists[0]:
        marks.append((moment, action))
        moment += {"F": 1, "B": 2}[action.op] + (6 if action == Action(0, "F", 2) else 0)
    marks.append((moment, "else"))
    step, _ = measure(0, [RankRecord(0, 0, 0, Offset(0, 0), marks)])
    assert step.predicted.makespan == step.measured.makespan == 18
    durations = {s.action.op: s.end - s.start for row in step.predicted.spans for s in row}
    assert durations == {"F": 2.5, "B": 2}
    assert (step.metrics["pipeline/stage_0_F"], step.metrics["pipeline/bubble"]) == (1, 0)


def test_trace_has_three_rows_a_rank_and_arrows_between_them() -> None:
    trace = json.loads(json.dumps(chrome_trace(*measure(7, records()))))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["otherData"]["step"] == 7
    assert trace["otherData"]["pipeline/pass_seconds"] == 12
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["ph"]].append(event)
    assert sorted(events) == ["M", "X", "f", "s"]
    names = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    assert names == {0: "rank 0 (stage 1)", 1: "rank 1 (stage 0)"}
    sort = {e["pid"]: e["args"]["sort_index"] for e in events["M"] if "sort" in e["name"]}
    assert sort == {0: 1, 1: 0}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events["M"] if "thread" in e["name"]}
    found: dict[tuple[int, str], list[tuple[str, float, float]]] = defaultdict(list)
    for e in events["X"]:
        if e["dur"]:
            place = e["pid"], rows[e["pid"], e["tid"]]
            found[place].append((e["name"], e["ts"] / 1e6, e["dur"] / 1e6))
    assert found == {
        (1, "computing"): [("0F0", 1, 2), ("0B0", 9, 4), ("optimizer", 17, 3)],
        (1, "messages"): [("wait for 0B0", 3, 6)],
        (1, "reduction"): [("exchange ends", 14, 2)],
        (0, "computing"): [("1F0", 4, 2), ("1I0", 6, 2), ("1W0", 8, 3)],
        (0, "messages"): [("wait for all ranks", 1, 1), ("wait for 1F0", 2, 2)],
    }
    # An arrow begins in the sending of its message and ends where the action that uses it begins.
    starts = {e["id"]: (e["name"], e["pid"], e["tid"], e["ts"] / 1e6) for e in events["s"]}
    ends = {e["id"]: (e["pid"], e["tid"], e["ts"] / 1e6, e["bp"]) for e in events["f"]}
    assert list(starts.values()) == [("1F0", 1, 1, 3), ("0B0", 0, 1, 8)]
    assert [ends[key] for key in starts] == [(0, 0, 4, "e"), (1, 0, 9, "e")]


def test_labels_that_do_not_fit_their_cell_are_left_out() -> None:
    step, _ = measure(7, records())
    text = draw_svg({"predicted": step.predicted, "measured": step.measured}, "Step 7")
    assert text.count('class="cell') == 10
    narrow = step.measured.spans[0][0]._replace(end=0.02)
    spans = (narrow, *step.measured.spans[0][1:]), step.measured.spans[1]
    measured = type(step.measured)(spans)
    assert draw_svg({"measured": measured}, "Step 7").count('class="cell') == 4


def test_recorder_keeps_moments_in_order() -> None:
    recorder = Recorder()
    before = time.monotonic()
    recorder(Action(0, "F", 0))
    recorder(Wait("F", 0, 0))
    marks = recorder.stop()
    assert [activity for _, activity in marks] == [Action(0, "F", 0), Wait("F", 0, 0), "else"]
    moments = [before, *[moment for moment, _ in marks], time.monotonic()]
    assert moments == sorted(moments)


class Event:
    """A CUDA event whose moment on the device's clock is that of a counter."""

    clock = 0.0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.moment = Event.clock = Event.clock + 250.0

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, later: Event) -> float:
        return later.moment - self.moment


def test_events_are_mapped_to_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr("lightning_pipeline.activities.time.monotonic", lambda: 50.0)
    recorder = make_recorder(torch.device("cuda", 1))
    assert isinstance(recorder, EventRecorder)
    recorder("else")
    recorder(Action(0, "F", 0))
    assert Event.waits == 0
    assert recorder.stop() == [(49.5, "else"), (49.75, Action(0, "F", 0)), (50.0, "else")]
    assert Event.waits == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({}, ["a step to record", "no steps and no every_n_steps", "steps=[10]"]),
        ({"steps": [3, -1]}, ["numbers of steps", "got -1", "steps=[10]"]),
        ({"steps": ["last"]}, ["numbers of steps", "got 'last'", "steps=[10]"]),
        ({"every_n_steps": 0}, ["every_n_steps must be an integer of at least 1", "got 0"]),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        PipelineTimeline(**arguments)
    for part in parts:
        assert part in str(caught.value)


def test_other_strategies_are_refused() -> None:
    callback = PipelineTimeline(steps=[0])
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=callback, enable_checkpointing=False, **off
    )
    with pytest.raises(MisconfigurationException) as caught:
        trainer.fit(BoringModel())
    for part in ("strategy='pipeline'", "got SingleDeviceStrategy", "remove the callback"):
        assert part in str(caught.value)


def test_steps_that_did_not_come_are_told() -> None:
    timeline = PipelineTimeline(steps=[1, 8, 50])
    trainer: Any = SimpleNamespace(global_step=8)
    with pytest.warns(UserWarning, match=r"the steps \[8, 50\], but the training ended after 8"):
        timeline.on_train_end(trainer, L.LightningModule())
