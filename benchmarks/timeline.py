"""PipelineTimeline on layers that sleep: its prediction, its cost, and the picture of its page.

Beside it the prediction of the planner, which has seen no step but measured the layers one by one.

python benchmarks/timeline.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_pipeline import PipelineTimeline
from lightning_pipeline.activities import Mark
from lightning_pipeline.bench.emulation import SleepingModel
from lightning_pipeline.bench.harness import Comparison, alternate, settle_process, spread
from lightning_pipeline.bench.ranks import run_ranks
from lightning_pipeline.bench.training import TrainerSteps, trainer_steps
from lightning_pipeline.measured import MeasuredStep
from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.planning.candidates import Candidate
from lightning_pipeline.planning.devices import local_device
from lightning_pipeline.planning.prediction import Prediction
from lightning_pipeline.schedules import SCHEDULES, get_schedule
from lightning_pipeline.simulate import StageTime
from lightning_pipeline.splitting import CPU_RATES

_ROWS, _WIDTH, _WARMUP = 4, 16, 2
_DRAWN = "1F1B"


class Recording(PipelineTimeline):
    """Records every step and shows none, which is no part of the step."""

    def _show(self, trainer: L.Trainer, marks: list[Mark]) -> None:
        pass


def model_of(name: str, args: argparse.Namespace) -> tuple[SleepingModel, int, list[str]]:
    """A layer for each stage, their number, and the partition."""
    num_stages = args.ranks * get_schedule(name).default_stages_per_rank
    model = SleepingModel(num_stages, StageTime(*[args.milliseconds / 1e3] * 3), _WIDTH)
    return model, num_stages, [f"net.{index}" for index in range(1, num_stages)]


def batch_of(args: argparse.Namespace) -> torch.Tensor:
    return torch.ones(_ROWS * args.microbatches, _WIDTH)


def plan(name: str, args: argparse.Namespace) -> float:
    """Seconds of a pass as the planner predicts them."""
    settle_process()
    model, num_stages, partition = model_of(name, args)
    host, count, batch = torch.device("cpu"), args.microbatches, batch_of(args)
    sizes = len(batch), (count, count), num_stages, CPU_RATES, {}
    blueprint = Blueprint(model, batch, *sizes, partition=partition, measured_on=host)  # type: ignore[arg-type]
    depth, device = num_stages // args.ranks, local_device(host)
    candidate = Candidate(get_schedule(name), args.ranks, 1, depth, count, "none")
    rates = device.rates(torch.float32)
    return Prediction(candidate, blueprint.cut(num_stages), len(batch), device, rates).seconds


def steps_of(
    name: str, args: argparse.Namespace, callback: PipelineTimeline | None
) -> TrainerSteps:
    """The steps of a Trainer whose stages sleep for as long each."""
    model, _, partition = model_of(name, args)
    strategy = {"schedule": name, "num_microbatches": args.microbatches, "partition": partition}
    callbacks: Any = [callback] if callback is not None else []
    batches = [batch_of(args)]
    return trainer_steps(model, batches, ranks=args.ranks, strategy=strategy, callbacks=callbacks)


def predict(name: str, args: argparse.Namespace, folder: str) -> list[MeasuredStep]:
    """Runs on every rank: recorded steps, one by one."""
    settle_process()
    timeline = PipelineTimeline(every_n_steps=1, dirpath=folder)
    subject, found = steps_of(name, args, timeline), []
    for _ in range(_WARMUP + args.rounds):
        alternate({name: subject}, rounds=1, warmup=0)
        assert timeline.last is not None
        found.append(timeline.last)
    return found[_WARMUP:]


def compare(name: str, args: argparse.Namespace) -> Comparison:
    """Runs on every rank: steps with the callback, with it off, and without, in turn."""
    settle_process()
    subjects = {
        "without": steps_of(name, args, None),
        "recorded": steps_of(name, args, Recording(every_n_steps=1)),
        "off": steps_of(name, args, Recording(steps=[10**9])),
        "without again": steps_of(name, args, None),
    }
    return alternate(subjects, rounds=args.rounds, warmup=_WARMUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("ranks", 4), ("microbatches", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--milliseconds", type=float, default=10.0)
    names = [entry.name for entry in SCHEDULES]
    parser.add_argument("--schedules", nargs="*", choices=names, default=names)
    parser.add_argument("--picture", type=Path, help="where to write the picture of one step")
    parser.add_argument("--cost", action="store_true", help="the cost instead of the prediction")
    args = parser.parse_args()
    if args.cost:
        found = run_ranks(args.ranks, compare, _DRAWN, args, deadline=300)[0]
        for name in list(found.turns)[1:]:
            print(f"| {name} | {found.ratio(name, 'without')} |")
        return
    for schedule in args.schedules:
        planned = plan(schedule, args)
        with tempfile.TemporaryDirectory() as folder:
            steps = run_ranks(args.ranks, predict, schedule, args, folder, deadline=300)[0]
            if args.picture is not None and schedule == _DRAWN:
                picture = Path(folder, f"timeline-{steps[-1].step}.svg")
                args.picture.write_text(picture.read_text())
        ratio = spread([step.predicted.makespan / step.measured.makespan for step in steps])
        bubble, ideal = (
            spread([100 * getattr(step, kind).bubble for step in steps])
            for kind in ("measured", "predicted")
        )
        milliseconds = spread([1e3 * step.measured.makespan for step in steps])
        ahead = spread([planned / step.measured.makespan for step in steps])
        cells = [schedule, f"{milliseconds.median:.1f}", str(ratio), str(ahead)]
        cells += [f"{bubble.median:.1f} %", f"{ideal.median:.1f} %"]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
