"""Losses that are means over something else than samples: the step says over how many."""

from __future__ import annotations

import os

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.distributed.fits import Script, classes, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, images
from tests.models.modules import BatchNormCNN


def ragged(count):
    """Token labels, most of which are ignored; some rows have none at all."""

    def make(n, seed):
        labels = classes(n, 6, top=4, seed=seed)
        lengths = classes(n, top=6, seed=seed + 1)
        labels[torch.arange(6) >= lengths[:, None]] = -100
        labels[:5] = -100
        return TensorDataset(rows(n, 6, 5, seed=seed), labels)

    return make(count, 1), make(24, 2)


def share_of_a_replica():
    """Every second block of eight rows."""
    replica = int(os.environ["RANK"]) % 2
    training, validation = ragged(64)
    mine = torch.arange(64).view(-1, 2, 8)[:, replica].flatten()
    return TensorDataset(*(t[mine] for t in training.tensors)), validation


class Tagger(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
        self.net = nn.Sequential(*layers)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss, "weight": (batch[1] != -100).sum()}

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return {"loss": loss, "weight": (batch[1] != -100).sum()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("count", [48, 37])
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("1F1B", 2), ("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 2), ("GPipe", 4)],
)
def test_token_means_equal_one_device(schedule, ranks, count):
    script = Script(Tagger, lambda: ragged(count), trainer={"limit_val_batches": 2})
    expected = script.plain()
    for run in script.pipelined(ranks, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


class OneMean(Tagger):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 2), (2, 1), (2, 2)])
def test_one_mean_over_accumulated_batches_and_replicas(replicas, accumulate):
    """The batches of a window, over all replicas, count like one batch on one device."""
    window = 8 * replicas * accumulate
    quiet = {"limit_val_batches": 0, "max_steps": 4, "use_distributed_sampler": False}
    whole = Script(OneMean, lambda: ragged(64), batch_size=window, trainer=quiet)
    cut = Script(
        Tagger,
        (lambda: ragged(64)) if replicas == 1 else share_of_a_replica,
        batch_size=8,
        trainer={**quiet, "accumulate_grad_batches": accumulate},
    )
    expected = whole.plain()
    for run in cut.pipelined(2, replicas, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE


class Sometimes(Tagger):
    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        return out if batch_idx % 2 else out["loss"]


class Negative(Tagger):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "weight": -1}


@pytest.mark.parametrize(
    ("model", "message"),
    [(Sometimes, "for some of the batches.*none for others"), (Negative, "at least 0, got -1")],
)
def test_weights_that_make_no_sense(model, message):
    trainer = {"limit_val_batches": 0, "accumulate_grad_batches": 2}
    script = Script(model, lambda: ragged(64), trainer=trainer)
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        script.pipelined(2, deadline=30)


class Unweighted(Tagger):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize(
    ("model", "dataset", "note"),
    [
        (Tagger, ragged, ""),
        (Unweighted, ragged, "mean over the targets that are not ignored; return"),
        (BatchNormCNN, images, "such in all) normalises each microbatch by itself"),
    ],
)
def test_the_plan_tells_what_microbatches_change(model, dataset, note):
    script = Script(
        model,
        lambda: dataset(32),
        trainer={"limit_val_batches": 0, "max_steps": 1},
        after=lambda trainer, module: trainer.strategy.plan.notes,
    )
    for run in script.pipelined(2):
        assert note in "\n".join(run.extra) if note else not run.extra
