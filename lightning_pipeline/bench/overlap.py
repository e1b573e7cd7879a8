"""How much of the exchange of gradients between replicas a step has to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipeline.bench.emulation import SleepingModel
from lightning_pipeline.bench.harness import Steps, alternate, settle_process, spread
from lightning_pipeline.bench.ranks import run_ranks
from lightning_pipeline.bench.report import Report
from lightning_pipeline.bench.training import QuietStrategy, TrainerSteps, trainer_steps
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import StageTime

_ROWS = 4  # of a microbatch

COLUMNS = {
    "schedule": "schedule",
    "megabytes": "MB of gradients a rank",
    "seconds": "step, s",
    "without": "without exchange, s",
    "alone": "exchange alone, s",
    "exposed": "exposed, s",
    "share": "exposed / alone",
    "ratio": "step / without",
    "control": "without / without again",
}


def measure(
    schedules: Sequence[str] = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
    ranks: int = 4,
    replicas: int = 2,
    microbatches: int = 8,
    milliseconds: float = 20.0,
    width: int = 1024,
    rounds: int = 9,
    warmup: int = 2,
) -> Report:
    """Times steps with and without the exchange, on layers that sleep and have large weights.

    Args:
        schedules: Names.
        ranks: Ranks of one pipeline.
        replicas: Pipelines.
        microbatches: Number of microbatches.
        milliseconds: Time of a stage's forward, of its input and its weight gradient.
        width: Of a stage's weight, [width, width] of float32.
        rounds: Turns that count.
        warmup: Turns before.

    Returns:
        A row for each schedule. The exchange alone is one all-reduce of all gradients of a rank
        while all ranks do so.
    """
    settings: dict[str, Any] = dict(ranks=ranks, replicas=replicas, microbatches=microbatches)
    settings |= dict(milliseconds=milliseconds, width=width, rounds=rounds)
    report = Report("overlap", "Exchange of gradients that a step waits for.", settings, COLUMNS)
    for schedule in [get_schedule(name) for name in schedules]:
        sizes = ranks, replicas, microbatches, milliseconds / 1e3, width
        args = schedule.name, *sizes, rounds, warmup
        report.add(**run_ranks(ranks * replicas, _measure_on_rank, *args, deadline=300)[0])
    return report


class _Unreduced(QuietStrategy):
    """Replicas that do not exchange their gradients."""

    def _placed(self, step: str, args: tuple[Any, ...]) -> Any:
        module, pipeline = super()._placed(step, args)
        reducer = pipeline.held.reducer
        arm = type(reducer).arm
        reducer.arm = lambda first_pass, *_, **more: arm(reducer, first_pass, False)  # type: ignore[method-assign]
        return module, pipeline


def _measure_on_rank(
    name: str,
    ranks: int,
    replicas: int,
    microbatches: int,
    seconds: float,
    width: int,
    rounds: int,
    warmup: int,
) -> dict[str, Any]:
    settle_process()
    num_stages = ranks * get_schedule(name).default_stages_per_rank
    arguments: dict[str, Any] = {
        "pipeline_parallel_size": ranks,
        "schedule": name,
        "num_microbatches": microbatches,
        "partition": [f"net.{index}" for index in range(1, num_stages)],
    }

    def trainer(kind: type[QuietStrategy]) -> TrainerSteps:
        model = SleepingModel(num_stages, StageTime(seconds, seconds, seconds), width)
        batch = torch.ones(_ROWS * microbatches, width)
        return trainer_steps(model, [batch], ranks=ranks * replicas, strategy=kind(**arguments))

    reduced = trainer(QuietStrategy)
    # Only the replicas' placement is of use here: the first step makes it.
    subjects: dict[str, Any] = {
        "reduced": reduced,
        "unreduced": trainer(_Unreduced),
        "unreduced again": trainer(_Unreduced),
    }
    group = reduced.strategy.mesh.data_group
    size = (width * width + width) * num_stages // ranks
    gradients = torch.zeros(size)
    subjects["alone"] = Steps(lambda: dist.all_reduce(gradients, group=group))
    found = alternate(subjects, rounds=rounds, warmup=warmup)
    pairs = zip(*(found.turns[key] for key in ("reduced", "unreduced", "alone")), strict=True)
    waits = [(a.seconds - b.seconds, c.seconds) for a, b, c in pairs]
    return {
        "schedule": name,
        "megabytes": gradients.nbytes / 1e6,
        "seconds": found.seconds("reduced"),
        "without": found.seconds("unreduced"),
        "alone": found.seconds("alone"),
        "exposed": spread([exposed for exposed, _ in waits]),
        "share": spread([exposed / alone for exposed, alone in waits]),
        "ratio": found.ratio("reduced", "unreduced"),
        "control": found.ratio("unreduced again", "unreduced"),
    }
