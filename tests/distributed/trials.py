"""What comes of a random configuration: as on one device, refused before it begins, or wrong."""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import failing
from lightning_pipeline.errors import PipelineError
from lightning_pipeline.order_files import write_order
from lightning_pipeline.packing import Costs
from lightning_pipeline.search import search_order
from lightning_pipeline.simulate import StageBytes, StageTime
from tests.distributed.draws import Draw
from tests.distributed.fits import Run, Script, distance, rows
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE
from tests.models import drawn
from tests.models.blocks import WIDTH

DEADLINE = 40
STEPS, BREAK = 5, 2
# Of parameters and of what is logged, as in test_precision.py and test_zoo.py: microbatches round
# as on one device, validation rounds as in other batches.
TOLERANCES: dict[str, tuple[float, float | None]] = {
    "64-true": (TOLERANCE, TOLERANCE),
    "32-true": (0.0, 1e-6),
    "bf16-true": (0.0, None),
    "bf16-mixed": (0.0, None),
}


def _vectors(count: int, length: int, dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    def make(count: int, seed: int) -> TensorDataset:
        x, y = (
            rows(count, length, WIDTH, seed=seed),
            rows(count, drawn.TARGETS, seed=seed + 10),
        )
        return TensorDataset(x.to(dtype), y.to(dtype))

    return make(count, 1), make(7, 2)


CALLBACKS: dict[str, Callable[[Draw], L.Callback]] = {
    "average": lambda draw: EMAWeightAveraging(decay=0.7),
    "stop": lambda draw: EarlyStopping("train", patience=0, check_on_train_epoch_end=True),
    "window": lambda draw: GradientAccumulationScheduler({0: draw.accumulate, 1: 2}),
}


@dataclass
class Refusal:
    """How a rank ended without a run.

    Attributes:
        message: What it said.
        ours: Whether it is an error of the library's kinds, raised by it.
        steps: Optimizer steps before.
    """

    message: str
    ours: bool
    steps: int


@dataclass
class Tried(Script):
    """A script of which an error is an answer.

    Attributes:
        breaks_at: Step at which the run ends, for another one to go on from its checkpoint.
    """

    breaks_at: int | None = None

    def __call__(self, strategy: Any, devices: int) -> Any:
        modules: list[Any] = []
        self.setup = modules.append
        failing.shorten = lambda error: None  # where it was raised is looked at
        try:
            if self.breaks_at is not None:
                self._save(strategy, devices)
            return super().__call__(strategy, devices)
        except Exception as error:
            kind = type(error)
            innermost = traceback.extract_tb(error.__traceback__)[-1].filename
            ours = isinstance(error, PipelineError) or (
                kind in (MisconfigurationException, ValueError, TypeError)
                and "/lightning_pipeline/" in innermost
            )
            trainers = [getattr(module, "_trainer", None) for module in modules]
            steps = max((trainer.global_step for trainer in trainers if trainer), default=0)
            text = f"{kind.__name__}: {error}"
            return Refusal(text if ours else traceback.format_exc(), ours, steps)

    def _save(self, strategy: Any, devices: int) -> None:
        """Runs until the break."""
        first = Script(
            *(self.model, self.dataset, self.batch_size),
            {**copy.deepcopy(self.trainer), "max_steps": self.breaks_at},
            self.setup,
            lambda trainer, module: trainer.save_checkpoint(self.checkpoint),
            self.dtype,
        )
        first(strategy, devices)


def script(draw: Draw, folder: str, parts: int = 1) -> Tried:
    """The script of a draw.

    Args:
        draw: The draw.
        folder: For its checkpoint, of which each way to run has its own.
        parts: Into how many of the reference's batches each batch is cut, which accumulates them.
    """
    kind = drawn.Nudged if draw.nudged else drawn.Drawn
    dtype = torch.float64 if draw.precision == "64-true" else torch.float32
    make = partial(
        *(kind, draw.blocks, draw.frozen, draw.step),
        *(draw.optimizer, draw.scheduler, draw.log, draw.form, draw.thaws),
    )
    count = (3 * draw.rows + draw.rest) * draw.replicas
    trainer: dict[str, Any] = {
        "max_steps": STEPS,
        "accumulate_grad_batches": draw.accumulate * parts,
        "precision": draw.precision,
        "check_val_every_n_epoch": 1000 if draw.validate == "never" else 1,
        "num_sanity_val_steps": 1 if draw.validate == "sanity" else 0,
    }
    if draw.callback == "window":
        del trainer["accumulate_grad_batches"]
    if draw.callback != "none":
        trainer["callbacks"] = [CALLBACKS[draw.callback](draw)]
    if draw.validate == "often":
        trainer["val_check_interval"] = parts
    if draw.clip is not None:
        value, algorithm = draw.clip
        trainer |= {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    data = partial(_vectors, count, draw.length, dtype)

    def after(trainer: L.Trainer, module: L.LightningModule) -> list[float]:
        loader = DataLoader(data()[1], 3)
        if draw.then == "validate":
            return list(trainer.validate(module, loader, verbose=False)[0].values())
        if draw.then == "predict":
            return torch.cat(trainer.predict(module, loader)).flatten().tolist()
        return []

    goes_on = draw.then.startswith("go on")
    return Tried(
        *(make, data, draw.rows // parts, trainer),
        after=after,
        dtype=dtype,
        checkpoint=str(Path(folder, f"after_{BREAK}")) if goes_on else None,
        breaks_at=BREAK if goes_on else None,
    )


def arguments(draw: Draw, folder: str) -> dict[str, Any]:
    """Those of the strategy."""
    schedule = draw.schedule
    if schedule == "file":
        schedule = str(Path(folder, "order.csv"))
        n = draw.ranks * draw.depth
        times = [StageTime(1 + i % 3, 1 + i % 2, 2 - i % 2) for i in range(n)]
        costs = Costs(times, 0.5, [StageBytes(1, 1)] * n, [3.0 * n] * draw.ranks)
        placement = "v" if draw.depth == 2 and draw.rows % 2 else "loop"
        lists = search_order(costs, draw.ranks, draw.depth, int(draw.microbatches), placement)
        write_order(lists, schedule)
    partition: Any = draw.partition
    if not isinstance(partition, str):
        partition = tuple(f"net.blocks.{place}" for place in partition)
    return {
        "pipeline_parallel_size": draw.ranks,
        "data_parallel_size": draw.replicas,
        "schedule": schedule,
        "stages_per_rank": draw.depth,
        "num_microbatches": draw.microbatches,
        "partition": partition,
        "activation_checkpointing": [nn.Linear] if draw.recompute == "layers" else draw.recompute,
        "balance_by": draw.balance_by,
        "save_distributed_checkpoint": draw.then == "go on from a folder",
    }


def reference(draw: Draw, folder: str) -> list[Any]:
    """What each replica should come to.

    Args:
        draw: The draw.
        folder: For its checkpoint.
    """
    if draw.against == "GPipe":
        n = draw.ranks * draw.depth
        given = arguments(replace(draw, ranks=n, depth=1, schedule="GPipe"), "")
        return run_ranks(n, script(draw, folder), given, n, deadline=DEADLINE)[:1]
    parts = int(draw.microbatches) if draw.against in ("microbatches", "rounding") else 1
    strategy = "auto" if draw.replicas == 1 else "ddp_find_unused_parameters_true"
    given_script = script(draw, folder, parts)
    return run_ranks(draw.replicas, given_script, strategy, draw.replicas, deadline=DEADLINE)


@dataclass(frozen=True)
class Outcome:
    """What came of a draw.

    Attributes:
        kind: ``"equal"``, ``"refused"``, ``"no reference"`` or what is wrong.
        text: More of it.
    """

    kind: str
    text: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the library did what it promises."""
        return self.kind in ("equal", "refused", "no reference")


def examine(draw: Draw) -> Outcome:
    """Runs a draw on one device and in a pipeline."""
    world = draw.ranks * draw.replicas
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        given = arguments(draw, folder)
        try:
            runs = run_ranks(world, script(draw, folder), given, world, deadline=DEADLINE)
        except RankFailed as error:
            return Outcome(type(error).__name__, str(error))
        refusals = [run for run in runs if isinstance(run, Refusal)]
        judged = _judge(refusals, world) if refusals else None
        if judged is not None and judged.is_right:
            return judged
        expected = reference(draw, other)
    failed = [run.message for run in expected if isinstance(run, Refusal)]
    if failed:
        return Outcome("no reference", failed[0])
    return judged or _compare(draw, runs, expected)


def _judge(refusals: list[Refusal], world: int) -> Outcome:
    said = "\n".join(refusal.message for refusal in refusals)
    if len(refusals) < world:
        return Outcome("refused on some ranks only", said)
    if not all(refusal.ours for refusal in refusals):
        return Outcome("foreign error", said)
    if any(refusal.steps for refusal in refusals):
        return Outcome("refused after it began", said)
    return Outcome("refused", refusals[0].message)


def _compare(draw: Draw, runs: list[Run], expected: list[Run]) -> Outcome:
    of_parameters, of_numbers = TOLERANCES[draw.precision]
    for rank, run in enumerate(runs):
        wanted = expected[rank % draw.replicas]
        far = distance(run, wanted)
        if not far <= of_parameters:
            return Outcome("other parameters", f"{far:.2e} on rank {rank}")
        pairs = {
            "metrics": [_comparable(draw, each.metrics) for each in (run, wanted)],
            draw.then: [run.extra, wanted.extra],
        }
        for name, (found, known) in pairs.items():
            near = pytest.approx(known, rel=of_numbers, abs=of_numbers)
            if of_numbers is not None and found != near:
                return Outcome(f"other {name}", f"{found} on rank {rank}, not {known}")
    return Outcome("equal")


def _comparable(draw: Draw, metrics: dict[str, float]) -> dict[str, float]:
    """Those of both: a reference that accumulates microbatches logs each of them in training."""
    validation = draw.against in ("microbatches", "rounding")
    return {k: v for k, v in metrics.items() if not validation or k in ("val", "size", "error")}


SIMPLE: dict[str, Any] = {
    "frozen": (),
    "step": "forward",
    "rest": 0,
    "length": 1,
    "replicas": 1,
    "schedule": "GPipe",
    "depth": 1,
    "partition": "auto",
    "recompute": "none",
    "balance_by": "cost",
    "accumulate": 1,
    "clip": None,
    "validate": "never",
    "then": "nothing",
    "optimizer": "SGD",
    "scheduler": "none",
    "log": "plain",
    "nudged": False,
    "form": "list",
    "thaws": False,
    "callback": "none",
    "ranks": 2,
    "microbatches": 2,
}


def simplify(draw: Draw, outcome: Outcome) -> Draw:
    """A draw that goes wrong in the same way, with one simple value after the other tried."""
    changes = [{name: value} for name, value in SIMPLE.items()]
    for change in changes:
        tried = replace(draw, **change)
        if tried != draw and examine(tried).kind == outcome.kind:
            draw = tried
    for place in reversed(range(len(draw.blocks))):
        tried = replace(draw, blocks=draw.blocks[:place] + draw.blocks[place + 1 :], frozen=())
        if tried.blocks and examine(tried).kind == outcome.kind:
            draw = tried
    return draw
