"""What grows with layers, stages and microbatches: planning, steps, memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeline.bench.by_hand import HandSteps
from lightning_pipeline.bench.harness import Spread, alternate, now, settle_process
from lightning_pipeline.bench.memory import (
    reset_resident_peak,
    resident,
    resident_peak,
    return_memory_at_once,
)
from lightning_pipeline.bench.models import Chain, Model, cuts
from lightning_pipeline.bench.ranks import DeadlineMet, run_ranks
from lightning_pipeline.bench.report import Report
from lightning_pipeline.bench.training import trainer_steps
from lightning_pipeline.placing import SECONDS_PER_BYTE
from lightning_pipeline.schedules import Schedule, get_schedule
from lightning_pipeline.splitting import StageFunction, partition, record

_PATIENCE = 300  # seconds


class Layer(nn.Module):
    """A residual perceptron, small or wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, width]."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def layers(width: int) -> Model:
    """A chain of such layers."""
    return Model(
        lambda count: [Layer(width) for _ in range(count)],
        lambda rows: (torch.randn(rows, width), torch.randn(rows, width)),
        nn.functional.mse_loss,
    )


def planning(
    num_layers: Sequence[int] = (10, 30, 100, 300, 1000),
    num_stages: Sequence[int] = (2, 8, 64),
    width: int = 8,
    first_steps: bool = True,
) -> Report:
    """Seconds to record a model, to find its cut, and to cut it, in one process.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages that it is cut into; more than layers are left out.
        width: Width of a layer.
        first_steps: Whether to time as well what a first step takes longer than a later one, on
            two ranks that share all stages.
    """
    columns = {
        "layers": "layers",
        "stages": "stages",
        "record": "record, s",
        "partition": "find the cut, s",
        "cut": "cut, s",
        "seconds": "all, s",
        "per_layer": "ms a layer",
        "first": "first step over a later one, s",
    }
    settings = dict(width=width)
    report = Report("planning", "Seconds to plan and cut.", settings, columns)
    for count, stages in itertools.product(num_layers, num_stages):
        if stages > count:
            continue
        row: dict[str, Any] = {"layers": count, "stages": stages, **_plan(count, stages, width)}
        row["per_layer"] = 1e3 * row["seconds"] / count
        if first_steps:
            try:
                row["first"] = run_ranks(2, _first_step, count, stages, width, deadline=_PATIENCE)[
                    0
                ]
            except DeadlineMet:
                row["first"] = f"more than {_PATIENCE}"
        report.add(**row)
    return report


def _plan(num_layers: int, num_stages: int, width: int) -> dict[str, float]:
    chain = layers(width).chain(num_layers)
    clock = [time.perf_counter()]
    program = record(chain.net, (torch.zeros(4, width),), {}, num_stages=num_stages)
    clock.append(time.perf_counter())
    sizes = program.cost, program.legal, program.bytes_at, num_stages
    found = partition(*sizes, seconds_per_byte=SECONDS_PER_BYTE)
    clock.append(time.perf_counter())
    for low, high in itertools.pairwise([0, *found, program.num_pieces]):
        StageFunction(program, low, high)
    clock.append(time.perf_counter())
    parts = [b - a for a, b in itertools.pairwise(clock)]
    return {**dict(zip(("record", "partition", "cut"), parts, strict=True)), "seconds": sum(parts)}


def _first_step(num_layers: int, num_stages: int, width: int) -> float:
    settle_process()
    strategy = {"schedule": "LoopedBFS", "stages_per_rank": num_stages // 2, "num_microbatches": 2}
    model = layers(width)
    trainer = trainer_steps(model.chain(num_layers), model.batches(4), ranks=2, strategy=strategy)
    start = now()
    first = trainer.run(start, 1) - start
    start = now()
    return first - (trainer.run(start, 1) - start)


def actions(
    schedules: Sequence[str] = (
        "1F1B",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
    ),
    microbatches: Sequence[int] = (4, 8, 16, 32, 64, 128, 256),
    width: int = 16,
    ranks: int = 2,
    rounds: int = 7,
    warmup: int = 2,
) -> Report:
    """Step time of stages that do next to nothing, against microbatches, ours and by hand.

    All counts of one schedule take turns. The time of a step is fitted by a line: what a step
    costs, and what each further microbatch does; an action is one entry of the longest list of a
    rank (forward, backward, or a part of a backward).

    Args:
        schedules: Names.
        microbatches: Numbers of microbatches.
        width: Width of a layer; a stage is one layer, a microbatch one row.
        ranks: Ranks of the pipeline.
        rounds: Turns that count.
        warmup: Turns before.
    """
    columns = {
        "schedule": "schedule",
        "who": "who",
        "microbatches": "microbatches",
        "seconds": "step, s",
        "per_microbatch": "us a microbatch",
        "to_hand": "ours / by hand",
        "step": "line: us a step",
        "slope": "line: us a microbatch",
        "off": "off the line",
    }
    settings = dict(width=width, ranks=ranks, rounds=rounds)
    report = Report("actions", "Time of a step of tiny stages.", settings, columns)
    for schedule in [get_schedule(name) for name in schedules]:
        args = schedule.name, list(microbatches), width, ranks, rounds, warmup
        for row in run_ranks(ranks, _actions_on_rank, *args, deadline=570)[0]:
            report.add(**row)
    return report


def _actions_on_rank(
    name: str, microbatches: list[int], width: int, ranks: int, rounds: int, warmup: int
) -> list[dict[str, Any]]:
    settle_process()
    schedule, model = get_schedule(name), layers(width)
    depth = schedule.default_stages_per_rank
    legal = [m for m in microbatches if schedule.allows_microbatches(m, ranks, depth)]
    subjects: dict[str, Any] = {}
    for m in legal:
        chain, batches = model.chain(ranks * depth), model.batches(m)
        subjects[f"hand {m}"] = HandSteps(chain, model.loss, batches, schedule, depth, m)
        chain = model.chain(ranks * depth)
        strategy = _cut(schedule, ranks, ranks * depth, m)
        subjects[f"ours {m}"] = trainer_steps(chain, batches, ranks=ranks, strategy=strategy)
    found = alternate(subjects, rounds=rounds, warmup=warmup)
    rows = []
    for who in ("hand", "ours"):
        seconds = {m: found.seconds(f"{who} {m}") for m in legal}
        slope, step = _line(seconds)
        for m in legal:
            rows.append(
                {
                    "schedule": name,
                    "who": who,
                    "microbatches": m,
                    "seconds": seconds[m],
                    "per_microbatch": 1e6 * seconds[m].median / m,
                    "to_hand": found.ratio(f"ours {m}", f"hand {m}") if who == "ours" else None,
                    "step": 1e6 * step,
                    "slope": 1e6 * slope,
                    "off": seconds[m].median / (step + slope * m) - 1,
                }
            )
    return rows


def _line(seconds: dict[int, Spread]) -> tuple[float, float]:
    """Slope and intercept of the line with the least relative errors."""
    if len(seconds) == 1:
        [(m, value)] = seconds.items()
        return value.median / m, 0.0
    weights = [1 / value.median for value in seconds.values()]
    medians = [value.median for value in seconds.values()]
    slope, step = np.polyfit(list(seconds), medians, 1, w=weights)
    return float(slope), float(step)


def _cut(schedule: Schedule, ranks: int, num_layers: int, microbatches: int) -> dict[str, Any]:
    num_stages = ranks * schedule.default_stages_per_rank
    first = cuts(num_layers, num_stages)[1:-1]
    return {
        "schedule": schedule.name,
        "num_microbatches": microbatches,
        "partition": [f"net.{index}" for index in first],
    }


def memory(
    schedules: Sequence[str] = ("GPipe", "1F1B"),
    microbatches: Sequence[int] = (4, 8, 16, 32),
    ranks: int = 2,
    num_layers: int = 8,
    width: int = 64,
    rows: int = 8192,
) -> Report:
    """Peak memory of a step on each rank against microbatches of one size.

    Args:
        schedules: Names.
        microbatches: Numbers of microbatches.
        ranks: Ranks of the pipeline.
        num_layers: Layers of the model.
        width: Width of a layer.
        rows: Rows of a microbatch.

    Returns:
        A row for each; megabytes are by global rank, the last stage on rank 0, and the ratio is to
        the fewest microbatches.
    """
    columns = {
        "schedule": "schedule",
        "microbatches": "microbatches",
        "megabytes": "MB by rank",
        "ratio": "over the fewest",
    }
    settings = dict(ranks=ranks, num_layers=num_layers, width=width, rows=rows)
    report = Report(
        "memory", "Peak of resident memory in a step over that between steps.", settings, columns
    )
    for name in [get_schedule(name).name for name in schedules]:
        fewest: list[float] = []
        for m in microbatches:
            args = name, m, ranks, num_layers, width, rows
            found = run_ranks(ranks, _memory_on_rank, *args, deadline=300)
            fewest = fewest or found
            ratio = [a / b for a, b in zip(found, fewest, strict=True)]
            report.add(schedule=name, microbatches=m, megabytes=found, ratio=ratio)
    return report


def _memory_on_rank(
    name: str, microbatches: int, ranks: int, num_layers: int, width: int, rows: int
) -> float:
    settle_process()
    return_memory_at_once()
    model = layers(width)
    chain: Chain = model.chain(num_layers)
    strategy = _cut(get_schedule(name), ranks, num_layers, microbatches)
    batches = model.batches(rows * microbatches)
    trainer = trainer_steps(chain, batches, ranks=ranks, strategy=strategy)
    trainer.run(now(), 2)
    reset_resident_peak()
    before = resident()
    trainer.run(now(), 2)
    return (resident_peak() - before) / 1e6
