"""Ordinary scripts: what users write around the model, each against one device."""

from __future__ import annotations

import os

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed.fits import Script, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, images, vectors
from tests.models.modules import BatchNormCNN, FrozenPrefix, Perceptron

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


class Collects(Perceptron):
    """Lightning's recipe for values over an epoch."""

    def __init__(self):
        super().__init__()
        self.outputs, self.losses, self.latents = [], [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean_of_losses", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch, i):
        out = self.net(batch[0])
        self.outputs.append(out)
        return {"out": out, "rows": len(out)}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.latents.append(outputs["out"].sum())

    def on_validation_epoch_end(self):
        outputs = torch.cat(self.outputs)
        self.log("outputs", outputs.square().sum() + len(outputs))
        self.log("latents", torch.stack(self.latents).sum())
        self.outputs.clear()
        self.latents.clear()


class Detaches(Perceptron):
    """A head on features that take no gradient: the backbone must not be decayed."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.head(self.net(x).detach()), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class TiedTwice(L.LightningModule):
    """Two pairs of tied weights that lie across each other."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        self.net[3].weight, self.net[2].weight = self.net[0].weight, self.net[1].weight

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]).tanh()[:, :3], batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Thaw(BaseFinetuning):
    """Unfreezes in the middle of the training."""

    def freeze_before_training(self, module):
        self.freeze(module.net[:8])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[:8], optimizer, lr=0.01)


class ManyLoaders(Perceptron):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        out = self.net(batch[0])
        if dataloader_idx == 1:
            out = out + self.net(-batch[0])
        self.log("val", F.mse_loss(out, batch[1]))


class ReadsMetric(Perceptron):
    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        error = self.error(out, batch[1])
        self.log("error", error)
        if error.item() > 1e9 or float(error) < 0:
            raise RuntimeError("diverged")
        return F.mse_loss(out, batch[1])


class KeywordsAndTrainer(Perceptron):
    """Uses what Lightning offers inside a step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        weight = min(1.0, (self.global_step + 1) / 4) + self.current_epoch
        return weight * F.mse_loss(input=self.net(input=x), target=y) * self.trainer.max_epochs


class DrawsNoise(Perceptron):
    """Random numbers between the calls must agree on all stages."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = torch.randn_like(x)
        out = self.net(x + 0.0 * noise)
        return F.mse_loss(self.scale * out, y) + 0.0 * (noise * x).sum()


SCRIPTS = {
    "lists over an epoch": (Collects, {}),
    "detached features": (Detaches, {}),
    "tied twice": (TiedTwice, {}),
    "unfreezing": (FrozenPrefix, {"callbacks": [Thaw()]}),
    "metric read in the step": (ReadsMetric, {}),
    "keywords and trainer": (KeywordsAndTrainer, {}),
    "noise": (DrawsNoise, {}),
    "anomaly detection": (Perceptron, {"detect_anomaly": True}),
    "fast development run": (Perceptron, {"fast_dev_run": True, "max_steps": -1}),
    "overfitting": (Perceptron, {"overfit_batches": 2}),
    "validation in the epoch": (Perceptron, {"val_check_interval": 2}),
    "no inference mode": (Perceptron, {"inference_mode": False}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", SCRIPTS)
def test_script_equals_one_device(case, schedule):
    model, trainer = SCRIPTS[case]
    script = Script(model, lambda: vectors(48 + 5), trainer={"limit_val_batches": 2, **trainer})
    expected = script.plain()
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_fillers_may_read_metrics():
    """One row is one microbatch; the schedule adds three that count nothing."""
    script = Script(ReadsMetric, lambda: vectors(3), batch_size=1, trainer={"limit_val_batches": 0})
    expected = script.plain()
    for run in script.pipelined(2, schedule="DualPipeV"):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


class Loads(Script):
    """A script with data loaders of its own."""

    loaders = None

    def __call__(self, strategy, devices):
        fit = L.Trainer.fit
        L.Trainer.fit = lambda trainer, module, *_: fit(trainer, module, *self.loaders())
        return super().__call__(strategy, devices)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(rows(40, 6), rows(40, 3, seed=1), strict=True))


def several_loaders():
    training, validation = vectors(48)
    return DataLoader(training, 16), [DataLoader(validation, 8), DataLoader(validation, 8)]


def shuffled():
    training, validation = vectors(48)
    return DataLoader(training, 16, shuffle=True), DataLoader(validation, 8)


def shuffled_by_workers():
    training, validation = vectors(48)
    return DataLoader(training, 16, shuffle=True, num_workers=2), DataLoader(validation, 8)


def stream():
    return DataLoader(Stream(), 16), DataLoader(Stream(), 8)


@pytest.mark.parametrize(
    ("loaders", "model"),
    [
        (several_loaders, ManyLoaders),
        (shuffled, Perceptron),
        (shuffled_by_workers, Perceptron),
        (stream, Perceptron),
    ],
)
def test_loaders(loaders, model):
    script = Loads(model, lambda: vectors(8), setup=lambda module: L.seed_everything(3))
    script.loaders = loaders
    expected = script.plain()
    for run in script.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_unseeded_shuffling_agrees_within_a_pipeline():
    def unseeded(module):
        torch.seed()

    script = Loads(Perceptron, lambda: vectors(8), setup=unseeded)
    script.loaders = shuffled
    runs = script.pipelined(2)
    assert distance(runs[0], runs[1]) == 0


class Predicts(Perceptron):
    def predict_step(self, batch, batch_idx):
        hidden = self.net[:4](batch[0])
        return {"hidden": hidden, "out": self.net[4:](hidden), "rows": len(hidden)}

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.mse_loss(self.net(batch[0]), batch[1]))


def test_every_evaluation_on_its_own():
    """On a fresh trainer, so that the model is placed by the step that runs."""

    def after(trainer, module):
        data = DataLoader(vectors(29)[0], 12)
        trainer.fit_loop.epoch_loop.max_steps = 0
        [validated] = trainer.validate(module, data, verbose=False)
        [tested] = trainer.test(module, data, verbose=False)
        return validated, tested, trainer.predict(module, data)

    script = Script(Predicts, lambda: vectors(32), trainer={"max_steps": 1}, after=after)
    expected = script.plain()
    for run in script.pipelined(2, schedule="ZBVZeroBubble"):
        for values, wanted in zip(run.extra[:2], expected.extra[:2], strict=True):
            assert values == pytest.approx(wanted, rel=1e-12)
        for batch, wanted in zip(run.extra[2], expected.extra[2], strict=True):
            for key in ("hidden", "out"):
                torch.testing.assert_close(batch[key], wanted[key], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_have_the_buffers_of_the_first(schedule):
    script = Script(BatchNormCNN, lambda: images(128), trainer={"limit_val_batches": 2})
    runs = script.pipelined(2, 2, schedule=schedule, num_microbatches=4)
    for run in runs[1:]:
        assert distance(run, runs[0]) == 0


def test_learning_rate_finder():
    from lightning.pytorch.callbacks import LearningRateFinder

    class Finds(Perceptron):
        def __init__(self):
            super().__init__()
            self.learning_rate = 0.05

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.learning_rate)

    finder = {"callbacks": [LearningRateFinder(num_training_steps=20)], "default_root_dir": "/tmp"}
    script = Script(Finds, lambda: vectors(96), trainer=finder, after=lambda t, m: m.learning_rate)
    expected = script.plain()
    for run in script.pipelined(2):
        assert run.extra == pytest.approx(expected.extra, rel=1e-10)
        assert distance(run, expected) <= 1e-10


class ComputesMetric(ReadsMetric):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.error.update(out, batch[1])
        self.log("error", self.error.compute())
        return F.mse_loss(out, batch[1])


class CheckpointsASlice(Perceptron):
    def training_step(self, batch, batch_idx):
        out = batch[0]
        for i in range(0, len(self.net) - 1, 2):
            out = checkpoint(self.net[i : i + 2], out, use_reentrant=False)
        return F.mse_loss(self.net[-1](out), batch[1])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ComputesMetric, r"computes self.error after it updated it.*self.log\('error'"),
        (
            CheckpointsASlice,
            r"inside another function or module.*Checkpoint the modules themselves",
        ),
    ],
)
def test_refused_with_a_cure(model, message):
    script = Script(model, lambda: vectors(48), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        script.pipelined(2, deadline=30)


class Dies(Perceptron):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)


def test_a_killed_rank_ends_the_others():
    script = Script(Dies, lambda: vectors(48), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed) as caught:
        script.pipelined(2, deadline=25)
    codes = str(caught.value).splitlines()[0]
    assert codes.endswith("exit codes by rank: [1, -9]")
    assert "Rank 0 lost its connection to another rank" in str(caught.value)


def test_batches_in_a_dataclass_or_dict():
    class Named(Perceptron):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return {"inputs": {"x": batch[0]}, "y": batch[1], "names": ["row"] * len(batch[0])}

        def training_step(self, batch, batch_idx):
            assert len(batch["names"]) == len(batch["y"])
            return F.mse_loss(self.net(batch["inputs"]["x"]), batch["y"])

    script = Script(Named, lambda: vectors(53), trainer={"limit_val_batches": 0})
    expected = script.plain()
    for run in script.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
