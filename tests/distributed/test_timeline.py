"""Recorded steps of real runs: prediction, order, clocks, cost, files and logs."""

from __future__ import annotations

import csv
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_pipeline import PipelineTimeline, activities, clocks
from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.activities import Recorder
from lightning_pipeline.bench.emulation import SleepingModel, sleep_precisely
from lightning_pipeline.clocks import offset_of_clock
from lightning_pipeline.measured import MeasuredStep
from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.schedules import SCHEDULES, get_schedule
from lightning_pipeline.simulate import StageTime
from tests.distributed.fits import Script
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import Perceptron, vectors

TOLERANCE = 0.1
"""Of a prediction, relative."""

WARMUP, STEPS = 2, 5


class Keeping(PipelineTimeline):
    """Keeps all steps."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.all: list[MeasuredStep] = []

    def _show(self, trainer: L.Trainer, marks: list[Any]) -> None:
        super()._show(trainer, marks)
        assert self.last is not None
        self.all.append(self.last)


def sleep(schedule: str, milliseconds: float, microbatches: int, folder: str) -> Any:
    """Fits layers that sleep on this rank; returns its recorded steps and the time of a mark."""
    sleep_precisely()
    entry = get_schedule(schedule)
    num_stages = 2 * entry.default_stages_per_rank
    model = SleepingModel(num_stages, StageTime(*[milliseconds / 1e3] * 3))
    timeline = Keeping(steps=range(WARMUP, WARMUP + STEPS), dirpath=folder)
    strategy = {
        "schedule": schedule,
        "num_microbatches": microbatches,
        "partition": [f"net.{index}" for index in range(1, num_stages)],
    }
    script = Script(
        lambda: model,
        lambda: (torch.ones(4 * microbatches * (WARMUP + STEPS), 16), []),
        batch_size=4 * microbatches,
        trainer={"callbacks": [timeline], "limit_val_batches": 0, "max_steps": WARMUP + STEPS},
        dtype=torch.float32,
    )
    script(strategy, 2)
    return timeline.all, seconds_of_a_mark()


def seconds_of_a_mark(count: int = 2000) -> float:
    """The quickest of some series, for the machine may be busy with other things."""
    found = []
    for _ in range(5):
        recorder, activity = Recorder(), Action(0, "F", 0)
        start = time.perf_counter()
        for _ in range(count):
            recorder(activity)
        found.append((time.perf_counter() - start) / count)
    return min(found)


@pytest.mark.parametrize("schedule", [entry.name for entry in SCHEDULES])
def test_predicted_time_is_the_measured_one(schedule: str, tmp_path: Path) -> None:
    args = schedule, 5.0, 4, str(tmp_path)
    (steps, _), (others, _) = run_ranks(2, sleep, *args, deadline=60)
    assert steps == others  # the same on all ranks
    assert [step.step for step in steps] == list(range(WARMUP, WARMUP + STEPS))
    ratios = [step.predicted.makespan / step.measured.makespan for step in steps]
    assert abs(statistics.median(ratios) - 1) < TOLERANCE, ratios
    entry = get_schedule(schedule)
    lists = action_lists(entry, 2, entry.default_stages_per_rank, 4)
    for step in steps:
        assert [[s.action for s in row] for row in step.measured.spans] == lists
        # No action is shorter than its sleep, and none begins before what it needs is there.
        for row in step.measured.spans:
            for action, start, end in row:
                assert end - start >= 0.005 * (2 if action.op == "B" else 1)
        ends = {s.action: s.end for row in step.measured.spans for s in row}
        for row in step.measured.spans:
            for (stage, op, m), start, _ in row:
                if op == "F" and stage:
                    assert start >= ends[Action(stage - 1, "F", m)]
        metrics = step.metrics
        idle = [metrics[f"pipeline/idle_rank_{rank}"] for rank in (0, 1)]
        bubble = sum(idle) / 2 / metrics["pipeline/pass_seconds"]
        assert metrics["pipeline/bubble"] == pytest.approx(bubble)
        assert metrics["pipeline/step_seconds"] > metrics["pipeline/pass_seconds"]
        for rank in (0, 1):
            waiting = metrics[f"pipeline/waiting_rank_{rank}"]
            assert 0 <= metrics[f"pipeline/exposed_rank_{rank}"] <= waiting
    assert len(list(tmp_path.glob("timeline-*.svg"))) == STEPS


def test_recording_costs_less_than_a_hundredth_of_the_step(tmp_path: Path) -> None:
    steps, seconds = run_ranks(2, sleep, "InterleavedZeroBubble", 1.0, 4, str(tmp_path))[0]
    trace = json.loads((tmp_path / f"timeline-{WARMUP}.json").read_text())
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X" and not event["pid"]]
    num_marks = 2 * len(drawn)  # more than there are: behind each may be one that is not drawn
    step = statistics.median(step.metrics["pipeline/step_seconds"] for step in steps)
    assert num_marks > 2 * 24
    assert num_marks * seconds < 0.01 * step


# Runs of a usual model.

RUNS = {
    "1F1B": {"pipeline_parallel_size": 2},
    "replicas": {"pipeline_parallel_size": 2, "schedule": "InterleavedZeroBubble"},
    "V": {"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"},
    "recomputed": {"pipeline_parallel_size": 2, "activation_checkpointing": "full"},
}


def fit(name: str, folder: str, records: bool) -> Any:
    """Fits with two batches a step and with validations between them."""
    timeline = PipelineTimeline(steps=[1], every_n_steps=3)
    trainer = {
        "accumulate_grad_batches": 2,
        "val_check_interval": 1,
        "logger": CSVLogger(folder, name="", version=""),
        "log_every_n_steps": 1,
        "callbacks": [timeline] if records else [],
        "max_steps": 4,
    }
    script = Script(Perceptron, lambda: vectors(160), trainer=trainer)
    run = script({"num_microbatches": 4, **RUNS[name]}, 4 if name == "replicas" else 2)
    return run.state, timeline.last


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, tmp_path: Path) -> None:
    ranks = 4 if name == "replicas" else 2
    plain = run_ranks(ranks, fit, name, str(tmp_path / "plain"), False)
    found = run_ranks(ranks, fit, name, str(tmp_path / "recorded"), True)
    for (state, _), (expected, _) in zip(found, plain, strict=True):
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    last = found[0][1]
    assert last is not None and last.step == 2
    assert all(other == last for _, other in found)
    assert last.accuracy == 0
    schedule = get_schedule(str(RUNS[name].get("schedule", "1F1B")))
    lists = action_lists(schedule, 2, schedule.default_stages_per_rank, 4)
    done = [[s.action for s in row] for row in last.measured.spans]
    # a backward may run in two parts
    assert [
        [action for action in row if action.op != "W" or action in wanted]
        for row, wanted in zip(done, lists, strict=True)
    ] == [
        [action._replace(op="I") if action not in row else action for action in wanted]
        for row, wanted in zip(done, lists, strict=True)
    ]
    assert {key[-1] for key in last.metrics if "idle" in key} == {str(r) for r in range(ranks)}
    folder = tmp_path / "recorded"
    names = sorted(path.name for path in folder.glob("timeline*"))
    assert names == [f"timeline-{n}.{kind}" for n in (1, 2) for kind in ("json", "svg")]
    trace = json.loads((folder / "timeline-2.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(ranks))
    assert "measured" in (folder / "timeline-2.svg").read_text()
    with open(folder / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["pipeline/bubble"]]
    assert [row["step"] for row in rows] == ["1", "2"]
    for key, value in last.metrics.items():
        assert float(rows[-1][key]) == value


# Clocks of several hosts.

SHIFTS = [0.0, 5.0, -3.0, 40.0]


def shift_clock() -> None:
    """Gives this rank a clock of its own."""
    rank = torch.distributed.get_rank()
    monotonic = time.monotonic
    fake = SimpleNamespace(monotonic=lambda: monotonic() + SHIFTS[rank])
    activities.time = clocks.time = fake  # type: ignore[attr-defined]
    clocks.clock_name = lambda: f"host {rank}"


def compare_clocks(schedule: str) -> Any:
    shift_clock()
    mesh = Mesh(MeshSizes(2, 2), get_schedule(schedule), torch.distributed.get_rank())
    mesh.build_groups()
    return offset_of_clock(mesh, torch.device("cpu"))


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_clocks_are_compared_with_the_first_ranks(schedule: str) -> None:
    found = run_ranks(4, compare_clocks, schedule)
    assert found[0] == (0, 0)
    for offset, shift in zip(found[1:], SHIFTS[1:], strict=True):
        assert 0 < offset.accuracy < 0.1
        assert abs(offset.seconds + shift) <= offset.accuracy


def sleep_apart(folder: str) -> Any:
    shift_clock()
    return sleep("1F1B", 5.0, 4, folder)[0]


def test_ranks_with_clocks_of_their_own_are_shown_on_one(tmp_path: Path) -> None:
    steps = run_ranks(2, sleep_apart, str(tmp_path))[0]
    ratios = [step.predicted.makespan / step.measured.makespan for step in steps]
    assert abs(statistics.median(ratios) - 1) < TOLERANCE, ratios
    for step in steps:
        assert 0 < step.accuracy < 0.1
        ends = {s.action: s.end for row in step.measured.spans for s in row}
        for (_, _, m), start, _ in step.measured.spans[1][::2]:
            assert start > ends[Action(0, "F", m)] - step.accuracy
