"""Step time of every schedule over the critical path of its own order of actions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.bench.by_hand import HandSteps
from lightning_pipeline.bench.emulation import SLEEPS, Sleep, SleepingModel
from lightning_pipeline.bench.harness import (
    Comparison,
    Spread,
    Subject,
    Turn,
    alternate,
    settle_process,
    spread,
)
from lightning_pipeline.bench.ranks import run_ranks
from lightning_pipeline.bench.report import Report
from lightning_pipeline.bench.training import trainer_steps
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule
from lightning_pipeline.simulate import StageTime, simulate, simulate_measured

_ROWS, _WIDTH = 4, 16  # of a microbatch

COLUMNS = {
    "schedule": "schedule",
    "ranks": "ranks",
    "microbatches": "microbatches",
    "milliseconds": "ms a forward",
    "path": "path, s",
    "seconds": "step, s",
    "ratio": "step / path",
    "ratio_of_sleeps": "step / path of its own sleeps",
    "by_hand": "torch by hand / path of its own sleeps",
    "to_hand": "step / torch by hand",
    "busy": "cores busy",
    "out_of_order": "stages out of order",
}


def measure(
    schedules: Sequence[str] | None = None,
    ranks: Sequence[int] = (2, 4, 8),
    microbatches: Sequence[int] = (8, 16, 32),
    milliseconds: Sequence[float] = (10.0, 3.0),
    rounds: int = 7,
    warmup: int = 2,
    steps: int = 1,
    by_hand: bool = False,
) -> Report:
    """Times steps of a Trainer on layers that sleep, one layer a stage.

    A step is all that the Trainer does from one batch to the next, the optimizer's step included.
    Its critical path is that of the schedule's order with the nominal times and free messages, and
    once more with the times that the layers really slept in this very step.

    Args:
        schedules: Names; ``None`` is every schedule.
        ranks: Sizes of the pipeline.
        microbatches: Numbers of microbatches.
        milliseconds: Times of one stage's forward, and of its input and its weight gradient.
        rounds: Turns that count.
        warmup: Turns before.
        steps: Steps of a turn in a row between barriers. With one, the ratio has the whole
            overhead of a step in it; with several, ranks may run on into the next step.
        by_hand: Whether a loop by hand on torch's pipelining takes turns with the Trainer, where
            torch has the schedule.

    Returns:
        A row for each combination; stages are out of order that do not compute in the order of
        the list, such as a first stage whose backward torch never splits.
    """
    sizes = dict(rounds=rounds, warmup=warmup, steps=steps)
    settings = {**sizes, "by_hand": by_hand}
    report = Report("limit", "Step time over the critical path.", settings, COLUMNS)
    chosen = SCHEDULES if schedules is None else [get_schedule(name) for name in schedules]
    for num_ranks in ranks:
        for schedule in chosen:
            for count in microbatches:
                for each in milliseconds:
                    case = _Case(schedule, num_ranks, count, each / 1e3)
                    report.add(**case.row(by_hand, sizes))
    return report


class _Case:
    """One schedule at one size.

    Args:
        schedule: The schedule, with its default number of stages on a rank.
        ranks: Ranks of the pipeline.
        microbatches: Number of microbatches.
        seconds: Time of each of ``F``, ``I`` and ``W`` of a stage.
    """

    def __init__(self, schedule: Schedule, ranks: int, microbatches: int, seconds: float) -> None:
        self.schedule, self.ranks, self.microbatches = schedule, ranks, microbatches
        self.seconds = StageTime(seconds, seconds, seconds)
        self.num_stages = ranks * schedule.default_stages_per_rank

    def row(self, by_hand: bool, sizes: dict[str, int]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "schedule": self.schedule.name,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "milliseconds": 1e3 * self.seconds.forward,
        }
        depth = self.schedule.default_stages_per_rank
        by_hand = by_hand and self.schedule.in_torch
        try:
            lists = action_lists(self.schedule, self.ranks, depth, self.microbatches)
        except ValueError as error:
            return {**row, "out_of_order": "illegal", "reason": str(error)}
        path = simulate(lists, [self.seconds] * self.num_stages).makespan
        turns = (sizes["rounds"] + sizes["warmup"]) * sizes["steps"] * (1 + by_hand)
        args = by_hand, sizes
        deadline = 60 + 4 * path * turns
        found = run_ranks(self.ranks, self.measure_on_rank, *args, deadline=deadline)[0]
        turns_of_trainer = found.turns["trainer"]
        step = found.seconds("trainer")
        row |= {"path": path, "seconds": step}
        row["ratio"] = spread([turn.seconds / path for turn in turns_of_trainer])
        row["busy"] = found.cpu_seconds("trainer").median / step.median
        wrong = (out_of_order(lists, _log(turn), sizes["steps"]) for turn in turns_of_trainer)
        row["out_of_order"] = sorted(set().union(*wrong)) or "none"
        if sizes["steps"] == 1:
            row["ratio_of_sleeps"] = _over_sleeps(lists, turns_of_trainer)
        if by_hand:
            row["to_hand"] = found.ratio("trainer", "hand")
        if by_hand and sizes["steps"] == 1:
            row["by_hand"] = _over_sleeps(lists, found.turns["hand"])
        return row

    def measure_on_rank(self, by_hand: bool, sizes: dict[str, int]) -> Comparison:
        """Runs on every rank."""
        settle_process()
        strategy = {
            "schedule": self.schedule.name,
            "num_microbatches": self.microbatches,
            "partition": [f"net.{index}" for index in range(1, self.num_stages)],
        }
        batch, model = torch.ones(_ROWS * self.microbatches, _WIDTH), self._model()
        trainer = trainer_steps(model, [batch], ranks=self.ranks, strategy=strategy)
        subjects: dict[str, Subject] = {"trainer": trainer}
        if by_hand:
            subjects["hand"] = self._hand(batch)
        return alternate(subjects, **sizes, collect=take_sleeps)

    def _model(self) -> SleepingModel:
        return SleepingModel(self.num_stages, self.seconds, _WIDTH)

    def _hand(self, batch: torch.Tensor) -> HandSteps:
        meta = torch.empty(_ROWS, _WIDTH, device="meta")
        inner = [meta.clone().requires_grad_() for _ in range(self.num_stages)]
        depth = self.schedule.default_stages_per_rank
        args = self.schedule, depth, self.microbatches, [meta, *inner]
        return HandSteps(self._model(), _loss, [(batch, batch)], *args)


def _loss(out: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def _log(turn: Turn) -> list[Sleep]:
    return list(itertools.chain(*turn.collected))


def _over_sleeps(lists: Sequence[Sequence[Action]], turns: Sequence[Turn]) -> Spread:
    """Each step over the critical path of its own sleeps."""
    paths = [simulate_measured(lists, seconds_of(lists, _log(turn))).makespan for turn in turns]
    return spread([turn.seconds / path for turn, path in zip(turns, paths, strict=True)])


def take_sleeps() -> list[Sleep]:
    """The sleeps of this process since the last call."""
    taken = list(SLEEPS)
    SLEEPS.clear()
    return taken


def _by_layer(log: Iterable[Sleep]) -> dict[int, list[Sleep]]:
    layers: dict[int, list[Sleep]] = defaultdict(list)
    for sleep in log:
        layers[sleep.layer].append(sleep)
    return layers


def out_of_order(
    lists: Sequence[Sequence[Action]], log: Sequence[Sleep], steps: int = 1
) -> set[int]:
    """The stages that did not sleep in the order of their actions.

    Args:
        lists: Actions by rank.
        log: Sleeps of all ranks, each layer's in order; layer ``i`` is stage ``i``.
        steps: Number of steps in it.
    """
    found = {layer: [s.op for s in sleeps] for layer, sleeps in _by_layer(log).items()}
    wanted: dict[int, list[str]] = defaultdict(list)
    for row in lists:
        for action in row:
            wanted[action.stage].append("IW" if action.op == "B" else action.op)
    return {
        stage
        for stage, ops in wanted.items()
        if not _is_in_order(found.get(stage, []), ops * steps)
    }


def _is_in_order(found: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the operations are the wanted ones, each of one letter or of two in any order."""
    rest = iter(found)
    done = all(sorted(itertools.islice(rest, len(ops))) == sorted(ops) for ops in wanted)
    return done and next(rest, None) is None


def seconds_of(lists: Sequence[Sequence[Action]], log: Sequence[Sleep]) -> dict[Action, float]:
    """How long each action of one step really slept.

    Args:
        lists: Actions by rank.
        log: Sleeps of all ranks in that step, in the order of the actions.
    """
    left: dict[tuple[int, str], list[float]] = defaultdict(list)
    for sleep in reversed(log):
        left[sleep.layer, sleep.op].append(sleep.end - sleep.start)
    found = {}
    for row in lists:
        for action in row:
            ops = "IW" if action.op == "B" else action.op
            found[action] = sum(left[action.stage, op].pop() for op in ops)
    return found
