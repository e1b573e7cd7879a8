"""Metrics of selected rows, of several calls and of several loaders, against one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torchmetrics

from tests.distributed.feeds import Several, feeds
from tests.distributed.test_data import fed, loader
from tests.models.modules import Perceptron


def f1():
    return torchmetrics.F1Score("multiclass", num_classes=3, average="macro")


class Measures(Perceptron):
    """Notes what every batch has logged and returned."""

    def __init__(self):
        super().__init__()
        self.f1, self.chosen, self.rare, self.of_epoch = f1(), f1(), f1(), f1()
        self.weighted, self.listed, self.seen = torchmetrics.MeanMetric(), [], []

    def shown(self, batch):
        x, y = batch
        scores = self.net(x)
        return scores, y.argmax(-1), F.mse_loss(scores, y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        known = {name: float(value) for name, value in self.trainer.logged_metrics.items()}
        self.seen.append([known, {name: outputs[name].tolist() for name in outputs}])
        self.seen.append([entry.tolist() for entry in self.listed])


class Selects(Measures):
    def training_step(self, batch, batch_idx):
        scores, labels, loss = self.shown(batch)
        mask = labels == 2
        self.log("selected", self.f1(scores[mask], labels[mask]))
        self.chosen(scores[mask], labels[mask])
        self.log("chosen", self.chosen, on_step=True, on_epoch=True)
        rare = batch[0][:, 0] > 1.5  # in some batches no row, in others one
        if rare.any():
            self.log("rare", self.rare(scores[rare], labels[rare]))
        self.weighted((scores.amax(-1) * mask).sum() / mask.sum().clamp(min=1), weight=mask.sum())
        self.log("weighted", self.weighted, on_step=True, on_epoch=True)
        return loss


class CallsTwice(Measures):
    def training_step(self, batch, batch_idx):
        scores, labels, loss = self.shown(batch)
        self.log("a", self.f1(scores, labels))
        value = self.f1(-scores, labels)
        self.log("b", value, on_step=True, on_epoch=True)
        self.listed.append(value)
        return {"loss": loss, "value": value, "both": torch.stack([loss.detach()])[0]}


class TwoLoaders(Measures):
    """The second loader has other rows than the first one."""

    def training_step(self, batch, batch_idx):
        _, _, loss = self.shown(batch["a"])
        scores, labels, _ = self.shown(batch["b"])
        self.log("b", self.f1(scores, labels))
        self.weighted(scores.mean(), weight=len(labels))
        self.log("weighted", self.weighted, on_step=True, on_epoch=True)
        return loss


class MergesLoaders(Measures):
    """Makes one batch of those of two loaders."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        merged = tuple(torch.cat([one[i] for one in batch.values()]) for i in (0, 1))
        return {"all": merged} if len(batch["a"][0]) == 16 else (*merged, "text")

    def training_step(self, batch, batch_idx):
        batch = batch["all"] if isinstance(batch, dict) else batch[:2]
        scores, labels, loss = self.shown(batch)
        self.log("f1", self.f1(scores, labels))
        return {"loss": loss, "scores": scores.detach()}


def two_loaders(count=40):
    return {"a": loader(count, batch_size=16), "b": loader(count // 2)}


CASES = {
    "selected rows": feeds(lambda: fed(loader(56, batch_size=16)), Selects),
    "two calls": feeds(lambda: fed(loader(56, batch_size=16)), CallsTwice),
    "two loaders": feeds(lambda: fed(two_loaders(48)), TwoLoaders),
    "merged loaders": feeds(lambda: fed(two_loaders(40)), MergesLoaders),
}


def test_metrics_equal_one_device():
    for case in CASES.values():
        case.trainer |= {"limit_val_batches": 0, "log_every_n_steps": 1}
        case.after = lambda _, module: module.seen
    for name, (expected, runs) in Several(CASES).compare().items():
        for run in runs:
            for seen, wanted in zip(run.extra, expected.extra, strict=True):
                torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-14, msg=name)
