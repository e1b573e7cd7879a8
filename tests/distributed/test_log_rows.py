"""The rows that loggers get, and what bars and callbacks see, are those of one device or of DDP."""

from __future__ import annotations

import csv
import functools
import os
import tempfile

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import wrappers

from lightning_pipeline.errors import StepError
from lightning_pipeline.logs import LogRecorder
from lightning_pipeline.metrics import StepMetrics
from tests.distributed.fits import Run, distance
from tests.distributed.test_exactness import TOLERANCE
from tests.distributed.test_logs import data
from tests.distributed.test_scripts import Loads


class Logs(L.LightningModule):
    """A small classifier whose subclasses log."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def step(self, batch):
        x, y = batch
        logits = self.head(self.net(x))
        return logits, F.cross_entropy(logits, y), y

    def training_step(self, batch, batch_idx):
        return self.step(batch)[1]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class EveryArgument(Logs):
    def training_step(self, batch, batch_idx):
        logits, loss, y = self.step(batch)
        for name in ("mean", "avg", "sum", "min", "max"):
            value = (y == 1).sum() if name == "sum" else logits.max()
            value = logits.min() if name == "min" else value
            if name in ("mean", "avg"):
                value = logits.mean()
            self.log(name, value, reduce_fx=name, on_step=True, on_epoch=True)
        self.log("torch_sum", (y == 2).sum().float(), reduce_fx=torch.sum, on_epoch=True)
        self.log("torch_max", logits.max(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("python_min", logits.min(), reduce_fx=min, on_step=False, on_epoch=True)
        self.log("python_max", logits.max(), reduce_fx=max, on_step=True, on_epoch=True)
        self.log("bar", loss, prog_bar=True, logger=False, on_step=True, on_epoch=True)
        self.log("number", 3, on_epoch=True)
        self.log("graph", loss, enable_graph=True, on_epoch=True)
        self.log("synchronised", loss, sync_dist=True, on_step=True, on_epoch=True)
        for name in ("sum", "min", "max"):
            self.log(f"loss_{name}", loss.detach(), reduce_fx=name, on_step=True, on_epoch=True)
        self.log("everywhere", loss, sync_dist=True, sync_dist_group=torch.distributed.group.WORLD)
        if self.trainer.is_global_zero:
            self.log("zero", loss, rank_zero_only=True, on_epoch=True)
        counted = y > 0
        if counted.any():
            of_counted = F.cross_entropy(logits[counted], y[counted])
            self.log("counted", of_counted, batch_size=int(counted.sum()), on_epoch=True)
        self.log("constant", loss, batch_size=16, on_epoch=True)
        self.log("rows", loss, batch_size=len(y), on_step=True, on_epoch=True)
        if batch_idx == 1:
            self.log("once", loss, on_epoch=True)
        self.log_dict({"two/a": loss, "two/b": loss.detach() ** 0}, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        _, loss, y = self.step(batch)
        self.log("val", loss)
        self.log("val_step", loss, on_step=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False, prog_bar=True)
        self.log("val_constant", loss, batch_size=8)
        self.log("val_sum", (y == 3).sum(), reduce_fx="sum", sync_dist=True)
        self.log("val_max", loss, reduce_fx="max")
        return loss


class TwiceInAStep(Logs):
    def training_step(self, batch, batch_idx):
        logits, loss, _ = self.step(batch)
        for column in (0, 1):
            self.log("column", logits[:, column].mean(), on_step=True, on_epoch=True)
        return loss


class EveryHook(Logs):
    """Values that every rank knows."""

    def on_train_epoch_start(self):
        self.log("epoch_start", self.current_epoch + 1.0)

    def on_train_batch_start(self, batch, batch_idx):
        self.log("batch_start", batch[0].mean(), on_step=True, on_epoch=True)

    def training_step(self, batch, batch_idx):
        logits, loss, _ = self.step(batch)
        return {"loss": loss, "logits": logits}

    def on_before_backward(self, loss):
        self.log("before_backward", loss, on_epoch=True)

    def on_after_backward(self):
        self.log("after_backward", self.global_step + 1.0)

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), float("inf")))
        assert norm >= 0

    def on_before_zero_grad(self, optimizer):
        self.log("zero_grad", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("batch_end", outputs["logits"].square().mean() + outputs["loss"], on_epoch=True)

    def on_train_epoch_end(self):
        self.log_dict({"epoch_end": self.trainer.num_training_batches + 0.5, "zero": 0})

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_batch_end", batch[0].mean())

    def on_validation_epoch_end(self):
        self.log("val_epoch_end", self.current_epoch + 0.25, prog_bar=True)

    def on_validation_end(self):
        self.logger.log_metrics({"by_logger": 0.5}, step=self.global_step)


def accuracy(**arguments):
    return torchmetrics.Accuracy("multiclass", num_classes=4, **arguments)


class EveryMetric(Logs):
    def __init__(self):
        super().__init__()
        both = torchmetrics.MetricCollection(
            [accuracy(average="macro"), torchmetrics.F1Score("multiclass", num_classes=4)],
            prefix="train/",
        )
        self.fitted, self.validated = both, both.clone(prefix="val/", postfix="/x")
        self.apart = torchmetrics.MetricCollection([accuracy()], compute_groups=False)
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=4)
        self.weighted = torchmetrics.MeanMetric()
        self.synchronised = accuracy(dist_sync_on_step=True)
        self.own = accuracy(sync_on_compute=True, compute_with_cache=False)
        self.listed = nn.ModuleList([accuracy(average="macro"), accuracy(top_k=2)])
        self.named = nn.ModuleDict({"a": torchmetrics.AUROC("multiclass", num_classes=4)})
        self.range = wrappers.MinMaxMetric(accuracy())
        self.of_class = wrappers.ClasswiseWrapper(accuracy(average=None))
        self.window = wrappers.Running(torchmetrics.MeanMetric(), window=2)
        self.in_hook = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        logits, loss, y = self.step(batch)
        self.log_dict(self.fitted(logits, y), on_step=True, on_epoch=False)
        self.apart.update(logits, y)
        self.confusion.update(logits, y)
        self.weighted(logits.amax(-1), weight=y + 1)
        self.log("weighted", self.weighted, on_step=True, on_epoch=True)
        self.synchronised(logits, y)
        self.log("sync", self.synchronised, on_step=True, on_epoch=True)
        self.own(logits, y)
        self.log("own", self.own, metric_attribute="own", on_step=True, on_epoch=True)
        for i, metric in enumerate(self.listed):
            metric(logits, y)
            self.log(f"listed_{i}", metric, on_step=True, on_epoch=True)
        self.range.update(logits, y)
        self.of_class.update(logits, y)
        self.window(loss)
        self.log("window", self.window, on_step=True, on_epoch=False)
        return loss

    def on_train_epoch_end(self):
        self.log_dict({f"end_{n}": v for n, v in self.fitted.compute().items()})
        self.fitted.reset()
        self.log_dict(self.apart.compute())
        self.apart.reset()
        matrix = self.confusion.compute()
        self.log("diagonal", matrix.diag().sum() / matrix.sum())
        self.confusion.reset()
        self.log_dict({f"range_{n}": v for n, v in self.range.compute().items()})
        self.log_dict(self.of_class.compute())
        self.of_class.reset()
        for part in range(3):
            self.in_hook.reset()
            self.in_hook.update(part + 1.0)
            if part:
                self.in_hook.update(10.0)
            self.log(f"in_hook_{part}", self.in_hook.compute())

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, _, y = self.step(batch)
        self.validated.update(logits, y)
        self.named["a"](logits.softmax(-1), y)
        self.log(f"auroc_{dataloader_idx}", self.named["a"], add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log_dict(self.validated.compute())
        self.validated.reset()


class WrappedMetrics(Logs):
    """Metrics around metrics, and metrics that only hooks update."""

    def __init__(self):
        super().__init__()
        self.tracker = wrappers.MetricTracker(accuracy())
        self.range = wrappers.MinMaxMetric(accuracy())
        self.columns = wrappers.MultioutputWrapper(torchmetrics.MeanSquaredError(), 4)
        self.tasks = wrappers.MultitaskWrapper({"a": accuracy(), "b": accuracy(average="macro")})
        self.own = accuracy(sync_on_compute=False)
        self.loss = torchmetrics.MeanMetric()
        self.loss.persistent(True)
        self.curve = torchmetrics.PrecisionRecallCurve("multiclass", num_classes=4)
        self.in_hook = accuracy()

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        logits, loss, y = self.step(batch)
        self.tracker.update(logits, y)
        self.range(logits, y)
        self.columns.update(logits, F.one_hot(y, 4).double())
        self.tasks.update({"a": logits, "b": logits}, {"a": y, "b": y})
        self.own(logits, y)
        self.log("own", self.own, on_step=True, on_epoch=True)
        self.loss.update(loss)
        self.log("loss", self.loss)
        self.curve.update(logits.softmax(-1), y)
        if batch_idx % 2 == 0:
            values = self.range(logits, y)
            self.log_dict({"now": values["raw"], "least": values["min"]})
        return loss

    def on_train_epoch_end(self):
        self.log("tracked", self.tracker.compute())
        self.log("best", self.tracker.best_metric())
        self.log_dict({f"range_{n}": v for n, v in self.range.compute().items()})
        self.log("columns", self.columns.compute().sum())
        self.log_dict({f"task_{n}": v for n, v in self.tasks.compute().items()})
        self.log("curve", self.curve.compute()[0][0].sum())
        for metric in (self.range, self.columns, self.tasks, self.curve):
            metric.reset()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, _, y = self.step(batch)
        return logits, y

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("hook_now", self.in_hook(*outputs))
        self.in_hook.update(*outputs)

    def on_validation_epoch_end(self):
        self.log("hook_all", self.in_hook.compute())
        self.in_hook.reset()


class Rows(L.Callback):
    """Collects what the progress bar, the loggers and callbacks are given."""

    def __init__(self):
        self.seen = []

    def _note(self, trainer, module):
        kinds = (trainer.progress_bar_metrics, trainer.logged_metrics, trainer.callback_metrics)
        self.seen.append([{n: float(v) for n, v in kind.items()} for kind in kinds])

    def on_train_batch_end(self, trainer, module, *_):
        self._note(trainer, module)

    on_train_epoch_end = on_validation_end = on_train_epoch_start = _note


def csv_rows(trainer, module):
    """The lines of metrics.csv, on rank 0."""
    seen = next(c.seen for c in trainer.callbacks if isinstance(c, Rows))
    folder = trainer.log_dir  # asks all ranks
    if not trainer.is_global_zero:
        return [], seen
    with open(os.path.join(folder, "metrics.csv")) as file:
        lines = [{k: float(v) for k, v in line.items() if v} for line in csv.DictReader(file)]
    return lines, seen


def script(model: type[Logs], replicas: int) -> Loads:
    """Two epochs; validates on two loaders, with batches of other sizes than the training's."""
    trainer = {
        "max_steps": -1,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "callbacks": [Rows()],
        "logger": CSVLogger(tempfile.mkdtemp()),
    }
    made = Loads(model, data, trainer=trainer, after=csv_rows)

    def loaders():
        training, validation = data(35 * replicas)
        return DataLoader(training, 16), [DataLoader(validation, 8), DataLoader(validation, 13)]

    made.loaders = loaders
    return made


@functools.cache
def reference(model: type[Logs], replicas: int) -> Run:
    return script(model, replicas).plain(replicas)


def assert_rows(rows, expected):
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert set(row) == set(wanted)
        assert row == pytest.approx(wanted, rel=1e-10, abs=1e-12, nan_ok=True)


MODELS = (EveryArgument, TwiceInAStep, EveryHook, EveryMetric, WrappedMetrics)


@pytest.mark.parametrize(
    ("model", "ranks", "replicas", "schedule"),
    [
        *((model, 2, replicas, "1F1B") for model in MODELS for replicas in (1, 2)),
        *((model, 2, 1, "ZBVZeroBubble") for model in (EveryArgument, EveryMetric)),
    ],
)
def test_rows(model, ranks, replicas, schedule):
    expected = reference(model, replicas)
    layout = {"schedule": schedule, "num_microbatches": 4}
    runs = script(model, replicas).pipelined(ranks, replicas, **layout)
    assert_rows(runs[0].extra[0], expected.extra[0])
    for rank, run in enumerate(runs):
        assert distance(run, expected) <= TOLERANCE
        if rank % replicas == 0:  # the others log what is not synchronised of their own batches
            for seen, wanted in zip(run.extra[1], expected.extra[1], strict=True):
                assert_rows(seen, wanted)


class TalksInAStep(Logs):
    """Uses the logger and the console by itself, before and behind its modules."""

    def training_step(self, batch, batch_idx):
        self.print("says: before")
        self.logger.experiment.log_metrics({"before": len(batch[1])}, self.global_step)
        assert os.path.isdir(self.logger.root_dir) and isinstance(self.logger, CSVLogger)
        _, loss, y = self.step(batch)
        self.print("says: behind")
        self.logger.log_metrics({"behind": len(y)}, self.global_step)
        return loss


@pytest.mark.parametrize(("ranks", "schedule"), [(1, None), (2, "1F1B"), (2, "ZBVZeroBubble")])
def test_a_step_talks_once_a_microbatch(ranks, schedule, capfd):
    talking = script(TalksInAStep, 1)
    talking.trainer.update(limit_train_batches=2, limit_val_batches=0, max_epochs=1)
    arguments = {"schedule": schedule, "num_microbatches": 4}
    run = talking.pipelined(ranks, **arguments)[0] if schedule else talking.plain()
    microbatches = 4 if schedule else 1
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("says")]
    for name in ("before", "behind"):
        rows = [row[name] for row in run.extra[0] if name in row]
        assert rows == [16 / microbatches] * 2 * microbatches
        assert said.count(f"says: {name}") == 2 * microbatches


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([{"sync_dist_group": object()}], r"sync_dist_group=.*Remove sync_dist_group"),
        ([{"on_epoch": True}, {"on_epoch": False}], "different arguments.*Log each name in one"),
    ],
)
def test_logs_that_cannot_be_joined_are_refused(calls, message):
    module = Logs()
    recorder = LogRecorder(module, StepMetrics(module), {}, set())
    with pytest.raises(StepError, match=message):
        for arguments in calls:
            recorder("loss", torch.tensor(1.0), **arguments)
            recorder.end()
