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
        x, y = batch
        loss, hits = self.loss(batch), self.net(x).argmax(-1) == y
        self.log("val_loss", loss)
        self.log("size", x.square().mean(), batch_size=len(x))
        self.log("accuracy", hits.sum() / (y != -100).sum())
        self.log("recall", (hits & (y == 1)).sum() / (y == 1).sum(), batch_size=(y == 1).sum())
        return {"loss": loss, "weight": (y != -100).sum()}

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


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.5, 4.0], dtype=torch.float64)


class ClassWeighted(Tagger):
    """The mean of torch is one over the weights of the targets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("class_weights", CLASS_WEIGHTS.clone())

    def cost(self, logits, y):
        return F.cross_entropy(logits, y, self.class_weights, label_smoothing=0.1)

    def loss(self, batch):
        return self.cost(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def weigh(self, batch):
        loss, y = self.loss(batch), batch[1]
        return {"loss": loss, "weight": self.weights()[y[y != -100]].sum()}

    def weights(self):
        return self.class_weights

    def training_step(self, batch, batch_idx):
        self.log("train_loss", (out := self.weigh(batch))["loss"])
        return out

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (out := self.weigh(batch))["loss"])
        return out


class WeightedCriterion(ClassWeighted):
    """A module with weights of its own takes the loss."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.NLLLoss(CLASS_WEIGHTS.clone())

    def weights(self):
        return self.criterion.weight

    def loss(self, batch):
        logits = self.net(batch[0]).flatten(0, 1)
        return self.criterion(logits.log_softmax(-1), batch[1].flatten())


@pytest.mark.parametrize("model", [ClassWeighted, WeightedCriterion])
def test_means_weighted_by_class_equal_one_device(model):
    script = Script(model, lambda: ragged(37), trainer={"limit_val_batches": 2})
    expected = script.plain()
    for run in script.pipelined(2, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def even(count):
    """Token labels of which each row has two that are ignored, at different places."""
    labels, row = classes(count, 6, top=4), torch.arange(count)
    labels[row, 1 + row % 5] = labels[row, 1 + (row + 2) % 5] = -100
    return TensorDataset(rows(count, 6, 5), labels), TensorDataset(rows(8, 6, 5), labels[:8])


def late(count):
    """Labels of which the first row of a microbatch alone has none that are ignored."""
    (x, y), _ = (data.tensors for data in even(count))
    y = y.abs() % 4
    y[1::2, 3:] = -100
    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])


class Unweighted(Tagger):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class TakesLoss(nn.Module):
    """As the models of Hugging Face do, with the last target of each sequence left out."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        self.reduction = reduction

    def forward(self, x, y):
        y = F.pad(y, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), reduction=self.reduction)
        return loss.sum() / (1 if self.reduction == "mean" else (y != -100).sum())


class LossInside(Unweighted):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.net = TakesLoss(reduction)

    def loss(self, batch):
        return self.net(*batch)

    def validation_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "weight": (batch[1] != -100).sum()}


class SumInside(LossInside):
    def __init__(self):
        super().__init__("sum")


class BuiltLater(LossInside):
    """Has no weights when it is surveyed."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = TakesLoss()


class UnweightedClasses(ClassWeighted):
    training_step = Unweighted.training_step


class UnweightedCriterion(WeightedCriterion):
    training_step = Unweighted.training_step


class AllAlike(UnweightedClasses):
    """Weights that are all the same, and those of positive ones, leave a mean over samples."""

    def cost(self, logits, y):
        loss = F.cross_entropy(logits, y, torch.full_like(CLASS_WEIGHTS, 2.0))
        ones = (y % 2).double()
        return loss + F.binary_cross_entropy_with_logits(
            logits[:, 0], ones, pos_weight=torch.tensor(3.0)
        )


IGNORES = (
    "mean over the targets that are not ignored; return {'loss': loss, 'weight': their number}"
)
WEIGHS = "mean weighted by the classes of its targets; return"


@pytest.mark.parametrize(
    ("model", "dataset", "note"),
    [
        (Tagger, ragged, ""),
        (Unweighted, ragged, f"the loss of training_step is a {IGNORES}, for the mean over the wh"),
        (Unweighted, even, ""),
        (LossInside, ragged, IGNORES),
        (LossInside, late, IGNORES),
        (LossInside, even, ""),
        (SumInside, ragged, "if it is a mean over those that are not ignored, return"),
        (BuiltLater, ragged, IGNORES),
        (BuiltLater, even, ""),
        (ClassWeighted, ragged, ""),
        (UnweightedClasses, even, WEIGHS),
        (UnweightedCriterion, even, WEIGHS),
        (AllAlike, even, ""),
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


class WeightsTrainingAlone(Tagger):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize(
    ("model", "steps"),
    [(LossInside, "training_step"), (WeightsTrainingAlone, "validation_step")],
)
@pytest.mark.parametrize("sanity", [0, 1])
def test_the_plan_tells_it_of_evaluations(model, steps, sanity):
    """Also if the sanity check comes first; ``LossInside`` returns a weight in validation."""
    script = Script(
        model,
        lambda: ragged(32),
        trainer={"limit_val_batches": 1, "max_steps": 1, "num_sanity_val_steps": sanity},
        after=lambda trainer, module: trainer.strategy.plan.notes,
    )
    for run in script.pipelined(2):
        assert [f"the loss of {steps} is a {IGNORES}" in note for note in run.extra] == [True]
