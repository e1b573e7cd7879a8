"""What steps log is equal on all ranks and equal to one device."""

from __future__ import annotations

import re

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import TensorDataset

from lightning_pipeline import agreement
from tests.distributed.fits import Script, classes, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


def data(count: int = 75):
    def make(n, seed):
        return TensorDataset(rows(n, 6, seed=seed), classes(n, top=4, seed=seed))

    return make(count, 1), make(29, 2)


class Classifier(L.LightningModule):
    """Logs in every way that users do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=4, average="macro")
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=4)
        self.mean = torchmetrics.MeanMetric()
        self.both = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.Precision("multiclass", num_classes=4, average="macro"),
                "recall": torchmetrics.Recall("multiclass", num_classes=4, average="macro"),
            }
        )
        self.by_hand = torchmetrics.Accuracy("multiclass", num_classes=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log_dict({"a": loss * 2, "b": loss.item() + 1}, on_step=True, on_epoch=True)
        self.accuracy(logits, y)
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        self.f1(logits, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("sometimes", loss + batch_idx)
        self.by_hand.update(logits, y)
        return {"loss": loss, "logits": logits}

    def on_train_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.auroc.update(logits, y)
        self.log("auroc", self.auroc)
        self.both(logits, y)
        self.log_dict(self.both)
        self.log_dict({f"now_{k}": v for k, v in self.both(logits, y).items()})
        self.log("val_loss", F.cross_entropy(logits, y), batch_size=len(x))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class Steps(L.Callback):
    """Collects what callbacks see after every training step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append({name: float(v) for name, v in trainer.callback_metrics.items()})
        self.seen[-1]["output"] = float(outputs["loss"])


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 2), ("ZBVZeroBubble", 2), ("GPipe", 4)])
def test_every_way_to_log(schedule, ranks):
    def after(trainer, module):
        return trainer.callbacks[0].seen, trainer.optimizers[0].param_groups[0]["lr"]

    def make(callback=Steps):
        return Script(
            Classifier,
            data,
            trainer={"max_steps": -1, "max_epochs": 3, "callbacks": [callback()]},
            after=after,
        )

    expected = make().plain()
    assert any("sometimes" in seen for seen in expected.extra[0])
    for run in make().pipelined(ranks, schedule=schedule):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-10)
        assert run.extra[1] == expected.extra[1]
        for seen, wanted in zip(run.extra[0], expected.extra[0], strict=True):
            assert seen == pytest.approx(wanted, rel=1e-10)


def test_callbacks_decide_alike_on_all_ranks():
    def make():
        stopping = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        return Script(
            Classifier,
            data,
            trainer={"max_steps": -1, "max_epochs": 30, "callbacks": [stopping]},
            after=lambda trainer, module: (trainer.global_step, trainer.current_epoch),
        )

    expected = make().plain()
    assert expected.extra[1] < 30
    for run in make().pipelined(2):
        assert run.extra == expected.extra
        assert distance(run, expected) <= TOLERANCE


class Unequal(TensorDataset):
    """Every process draws samples of its own."""

    def __getitem__(self, index):
        import os

        x, y = super().__getitem__(index)
        return x + int(os.environ["RANK"]), y


def test_ranks_that_see_different_batches_are_told():
    script = Script(Classifier, lambda: (Unequal(rows(32, 6), classes(32, top=4)), data()[1]))
    with pytest.raises(RankFailed, match=r"got different batches.*seed_everything"):
        script.pipelined(2, deadline=30)


class LogsInHooks(Perceptron):
    """Logs what each rank has of its own, and what all know."""

    def on_after_backward(self):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("own", sum(norms))
        self.log("of one", sum(norms), rank_zero_only=True)
        self.log("step", float(self.trainer.global_step))

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, 2))


class Told(Script):
    """What the run warned of."""

    def __call__(self, strategy, devices):
        said = []
        agreement.rank_zero_warn = said.append
        super().__call__(strategy, devices)
        return said


def test_a_hook_that_logs_what_one_rank_knows_is_told_of():
    script = Told(Perceptron, lambda: vectors(96), trainer={"limit_val_batches": 0})
    assert script.pipelined(2) == [[], []]
    script.model = LogsInHooks
    for said in script.pipelined(2, schedule="Interleaved1F1B"):
        [text] = said
        assert re.search(
            r"self.log\('own'\) in on_after_backward .* [\d.]+, [\d.]+,.*grad_norm", text
        )
