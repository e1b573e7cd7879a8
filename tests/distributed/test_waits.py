"""A step reads nothing of what its device computes: on a GPU each reading waits for the launches.

Here the device is the host, which the code is told not to know: what is on a device must then be
read in the ways of `transfers` alone, and any other reading or copy is noted by torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torchmetrics import Metric

from lightning_pipeline import transfers
from tests.distributed.fits import Run, Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_data import DRAWN_APART, fed, feeds
from tests.distributed.test_exactness import TOLERANCE, images, tokens, vectors
from tests.distributed.test_weights import Tagger, ragged
from tests.models.modules import ImageClassifier, LanguageModel, Perceptron
from tests.waits import watched

STEPS = 8


class Watcher(L.Callback):
    """Watches the batches in which hooks are not compared either."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.watched = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.stack = ExitStack()
        if batch_idx in (3, 5, 6):
            self.watched += 1
            self.stack.enter_context(watched(self.found))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.stack.close()


class Weighted(Perceptron):
    """Gives a weight, which it computes, and logs numbers of the host and of the device."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        count = (y > 0).sum()
        errors = F.mse_loss(self.net(x), y, reduction="none") * (y > 0)
        loss = errors.sum() / count.clamp(min=1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rate", 0.1 + batch_idx)
        self.log("largest", x.max(), reduce_fx="max", batch_size=len(x))
        return {"loss": loss, "weight": count}


class Total(Metric):
    """Reads nothing, unlike torchmetrics' own, which look for NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.sum()

    def compute(self) -> torch.Tensor:
        return self.total


class Measured(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.total = Total()

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("total", self.total(batch[1]))
        return loss


class OnDevice:
    """A script that takes the host for a device."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __call__(self, *arguments: Any) -> Run:
        transfers.is_host = lambda device: False  # of this process alone
        return self.script(*arguments)


def on_device(
    script: Script, ranks: int, replicas: int = 1, deadline: float = 60, **arguments: Any
) -> list[Run]:
    """The script's runs on a pipeline of devices."""
    from tests.distributed.ranks import run_ranks

    world, arguments = ranks * replicas, {"pipeline_parallel_size": ranks, **arguments}
    return run_ranks(world, OnDevice(script), arguments, world, deadline=deadline)


def found(trainer: L.Trainer, module: L.LightningModule) -> tuple[int, list[str]]:
    [watcher] = [c for c in trainer.callbacks if isinstance(c, Watcher)]
    return watcher.watched, watcher.found


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "mlp": (Perceptron, vectors, {}),
    "cnn, clipped": (ImageClassifier, images, {"gradient_clip_val": 1.0}),
    "transformer": (partial(LanguageModel, depth=2), tokens, {}),
    "weighted": (Weighted, vectors, {}),
    "weight 0": (Tagger, ragged, {}),
    "metric": (Measured, vectors, {}),
    "accumulated": (Weighted, vectors, {"accumulate_grad_batches": 2}),
}
LAYOUTS = {"pp2": (2, 1), "pp2xdp2": (2, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_devices_waits_for_nothing_and_is_that_of_hosts(case, schedule, layout):
    model, dataset, trainer = CASES[case]
    ranks, replicas = LAYOUTS[layout]

    def script(callbacks, **rest):
        trainer_of = {**trainer, "max_steps": STEPS, "limit_val_batches": 0, **callbacks}
        return Script(model, lambda: dataset(16 * STEPS * 2), trainer=trainer_of, **rest)

    expected = script({}).pipelined(ranks, replicas, schedule=schedule)
    watched = script({"callbacks": [Watcher()]}, after=found)
    runs = on_device(watched, ranks, replicas, schedule=schedule)
    for run, own in zip(runs, expected, strict=True):
        num_batches, reads = run.extra
        assert num_batches >= 3 and reads == []
        assert distance(run, own) <= TOLERANCE
        assert run.metrics == pytest.approx(own.metrics, rel=1e-12)


@pytest.mark.parametrize("case", DRAWN_APART)
def test_ranks_that_draw_apart_are_told_behind_the_launches(case):
    script = feeds(lambda: fed(DRAWN_APART[case]()), limit_val_batches=0)
    message = r"rank 1 and rank 0 of one pipeline got different batches.*workers=True.*augmentation"
    with pytest.raises(RankFailed, match=message):
        on_device(script, 2, deadline=30)
