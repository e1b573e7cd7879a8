"""This library in a Trainer against torch.distributed.pipelining by hand, and zero bubble.

Every way trains the same model with the same microbatches; all take turns in one process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_pipeline.actions import action_lists
from lightning_pipeline.bench.by_hand import HandSteps
from lightning_pipeline.bench.harness import Spread, alternate, settle_process
from lightning_pipeline.bench.models import MODELS, Model, cuts, get_model
from lightning_pipeline.bench.ranks import run_ranks
from lightning_pipeline.bench.report import Report
from lightning_pipeline.bench.stage_times import StageTimes
from lightning_pipeline.bench.training import TrainerSteps, trainer_steps
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import StageTime, simulate
from lightning_pipeline.splitting import is_elsewhere

COLUMNS = {
    "model": "model",
    "way": "way",
    "seconds": "step, s",
    "to_base": "step / 1F1B by hand",
    "to_same": "step / same schedule by hand",
    "formula": "formula, s",
    "to_formula": "step / formula",
    "promised": "formula / that of 1F1B",
    "cpu": "CPU s of all ranks",
    "difference": "weights differ by",
}
BASE = "hand 1F1B"


class Way(NamedTuple):
    """One way to train.

    Attributes:
        by_hand: Whether there is no Trainer.
        schedule: Name of the schedule.
        depth: Stages on a rank.
    """

    by_hand: bool
    schedule: str
    depth: int

    def __str__(self) -> str:
        several = f" {self.depth}" if self.depth > 1 else ""
        return f"{'hand' if self.by_hand else 'ours'} {self.schedule}{several}"


def way(text: str) -> Way:
    """The way that ``"hand 1F1B"`` or ``"ours InterleavedZeroBubble 2"`` names.

    Raises:
        ValueError: If it names none.
    """
    who, *rest = text.split()
    if who not in ("hand", "ours") or len(rest) not in (1, 2):
        raise ValueError(
            f"A way must be 'hand' or 'ours', a schedule and the number of stages on a rank if it "
            f"is not 1, got {text!r}. It comes from ways. Write 'ours InterleavedZeroBubble 2'."
        )
    schedule = get_schedule(rest[0])
    depth = schedule.resolve_stages_per_rank(int(rest[1]) if len(rest) > 1 else 1)
    return Way(who == "hand", schedule.name, depth)


def measure(
    models: Sequence[str] = tuple(MODELS),
    ways: Sequence[str] = (BASE, "ours 1F1B"),
    ranks: int = 2,
    blocks: int = 16,
    rows: int = 256,
    microbatches: int = 8,
    sizes: dict[str, dict[str, int]] | None = None,
    rounds: int = 9,
    warmup: int = 3,
) -> Report:
    """Times steps of every way on every model.

    The formula is the critical path of the schedule's order with the times of forward, input
    gradient and weight gradient that each stage takes in CPU seconds, measured in the same rounds
    while all ranks work; the optimizer's step is added. Weight gradients are what a whole backward
    takes longer than the gradient of the input alone.

    Args:
        models: Names of models.
        ways: See `way`; ``"hand 1F1B"`` is what all are compared with, and is added if missing. A
            way that is there twice is its own control.
        ranks: Ranks of the pipeline.
        blocks: Blocks of a model.
        rows: Rows of a batch.
        microbatches: Number of microbatches.
        sizes: Other sizes by model: ``blocks``, ``rows`` and arguments of the model.
        rounds: Turns that count.
        warmup: Turns before.

    Returns:
        A row for each model and way.

    Raises:
        ValueError: If there is no such model or way.
    """
    for name in models:
        get_model(name)
    chosen = [way(text) for text in ways]
    chosen = chosen if way(BASE) in chosen else [way(BASE), *chosen]
    settings = dict(ranks=ranks, blocks=blocks, rows=rows, microbatches=microbatches, sizes=sizes)
    report = Report("hand", "The Trainer against torch by hand.", settings, COLUMNS)
    for name in models:
        own: dict[str, int] = {"blocks": blocks, "rows": rows, **((sizes or {}).get(name) or {})}
        case = _Case(name, own, ranks, microbatches)
        for row in case.rows_of(chosen, rounds, warmup):
            report.add(**row)
    return report


class _Case:
    """One model at one size."""

    def __init__(self, name: str, sizes: dict[str, int], ranks: int, microbatches: int) -> None:
        self.name, self.ranks, self.microbatches = name, ranks, microbatches
        sizes = dict(sizes)
        self.blocks, self.rows = sizes.pop("blocks"), sizes.pop("rows")
        self.model: Model = get_model(name)(**sizes)

    def rows_of(self, ways: list[Way], rounds: int, warmup: int) -> list[dict[str, Any]]:
        found = run_ranks(self.ranks, self.measure_on_rank, ways, rounds, warmup, deadline=570)[0]
        base = found["formulas"][str(way(BASE))]
        rows = []
        for name, each in found["ways"].items():
            formula = found["formulas"].get(name.removesuffix(" again"))
            promised = formula / base if formula and base else None
            rows.append({"model": self.name, "way": name, **each, "promised": promised})
        return rows

    def measure_on_rank(self, ways: list[Way], rounds: int, warmup: int) -> dict[str, Any]:
        """Runs on every rank."""
        settle_process()
        clock = StageTimes(
            self.model, self.blocks, self.model.batches(self.rows)[0], self.microbatches
        )
        made: dict[str, HandSteps | TrainerSteps] = {}
        for each in ways:
            name = str(each)
            name += " again" * (name in made)  # the control of the other one
            made[name] = self._hand(each) if each.by_hand else self._trainer(each)
        found = alternate({**made, "times": clock}, rounds=rounds, warmup=warmup)
        times, optimizer = clock.medians()
        formulas = {str(each): self._formula(each, times) + optimizer for each in ways}
        marks = {name: _marks(subject) for name, subject in made.items()}
        rows: dict[str, dict[str, Any]] = {}
        for name in made:
            same = "hand " + name.removeprefix("ours ").removeprefix("hand ")
            formula = formulas[name.removesuffix(" again")]
            seconds = found.seconds(name)
            rows[name] = {
                "seconds": seconds,
                "to_base": found.ratio(name, str(way(BASE))),
                "to_same": found.ratio(name, same) if same in made and same != name else None,
                "formula": formula,
                "to_formula": Spread(*(value / formula for value in seconds)),
                "cpu": found.cpu_seconds(name),
                "difference": _difference(marks[name], marks[str(way(BASE))]),
            }
        return {"ways": rows, "formulas": formulas, "times": times, "optimizer": optimizer}

    def _hand(self, each: Way) -> HandSteps:
        chain = self.model.chain(self.blocks)
        schedule, batches = get_schedule(each.schedule), self.model.batches(self.rows)
        args = chain, self.model.loss, batches, schedule, each.depth, self.microbatches
        return HandSteps(*args)

    def _trainer(self, each: Way) -> TrainerSteps:
        first = cuts(self.blocks, self.ranks * each.depth)[1:-1]
        strategy = {
            "schedule": each.schedule,
            "stages_per_rank": each.depth,
            "num_microbatches": self.microbatches,
            "partition": [f"net.{index}" for index in first],
        }
        chain, batches = self.model.chain(self.blocks), self.model.batches(self.rows)
        return trainer_steps(chain, batches, ranks=self.ranks, strategy=strategy)

    def _formula(self, each: Way, times: list[StageTime]) -> float:
        schedule = get_schedule(each.schedule)
        lists = action_lists(schedule, self.ranks, each.depth, self.microbatches)
        joined = len(times) // (self.ranks * each.depth)
        parts = [times[i : i + joined] for i in range(0, len(times), joined)]
        stages = [StageTime(*map(sum, zip(*part, strict=True))) for part in parts]
        return simulate(lists, stages).makespan


def _marks(subject: HandSteps | TrainerSteps) -> dict[str, float]:
    """A number for each parameter, of all ranks."""
    if isinstance(subject, HandSteps):
        held = subject.weights()
    else:
        names = subject.module.named_parameters()
        held = {name: p for name, p in names if not is_elsewhere(p)}
    own = {name: float(p.detach().double().norm()) for name, p in held.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: mark for marks in every for name, mark in marks.items()}


def _difference(marks: dict[str, float], others: dict[str, float]) -> float:
    """Largest relative difference; the same names must be there."""
    assert marks.keys() == others.keys(), marks.keys() ^ others.keys()
    return max(abs(mark - others[name]) / (others[name] or 1.0) for name, mark in marks.items())
