"""Every callback of Lightning, against one device.

Averages are in test_averaging.py, what happens on an exception in test_failing.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as cb
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import throughput_monitor
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from tests.distributed.feeds import own_clock
from tests.distributed.fits import Script, distance, rows
from tests.distributed.test_averaging import assert_same
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


class Shown(Perceptron):
    """Has something for every callback to look at."""

    scheduler: Any = None
    flops_per_batch = 1000

    def __init__(self):
        super().__init__()
        self.example_input_array = rows(4, 6)
        self.backbone, self.net = self.net[:8], self.net[8:]

    def forward(self, x):
        return self.scale * self.net(self.backbone(x))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": len(batch[0])}

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if self.scheduler is None:
            return optimizer
        make, arguments = self.scheduler
        return [optimizer], [{"scheduler": make(optimizer), **arguments}]


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


class Hears(L.Callback):
    """Notes every hook with what it gets besides the trainer and the module."""

    def __init__(self):
        self.heard = []


def _noting(name):
    def hook(self, trainer, module, *args, **kwargs):
        values = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.optim.Optimizer)]
        if name in ("on_save_checkpoint", "on_load_checkpoint"):
            values = sorted(values[0])
        self.heard.append((name, values))

    return hook


for hook_name in vars(L.Callback):
    if hook_name.startswith("on_") or hook_name in ("setup", "teardown"):
        setattr(Hears, hook_name, _noting(hook_name))


class Bar(cb.ProgressBar):
    shown: Any = ()

    def enable(self):
        pass

    def disable(self):
        pass

    def on_train_batch_end(self, trainer, module, *args):
        self.shown = [*self.shown, self.get_metrics(trainer, module)]


class Tqdm(cb.TQDMProgressBar):
    shown: Any = ()

    def on_train_batch_end(self, trainer, module, *args):
        super().on_train_batch_end(trainer, module, *args)
        bar = self.train_progress_bar
        self.shown = [*self.shown, (bar.desc, bar.n, bar.total, getattr(bar, "postfix", ""))]


class Rich(cb.RichProgressBar):
    shown: Any = ()

    def on_train_batch_end(self, trainer, module, *args):
        super().on_train_batch_end(trainer, module, *args)
        if self.is_enabled:
            task = self.train_progress_bar
            text = self._metric_component.render(task).plain
            self.shown = [*self.shown, (task.description, task.completed, task.total, text)]


def speaks(kind):
    """A summary that keeps its text."""

    class Speaks(kind):
        def on_fit_start(self, trainer, module):
            self.text, log = io.StringIO(), logging.getLogger(cb.model_summary.__name__)
            log.addHandler(logging.StreamHandler(self.text))
            log.setLevel(logging.INFO)
            with contextlib.redirect_stdout(self.text):
                super().on_fit_start(trainer, module)

    return Speaks(max_depth=2)


class Writer(cb.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, loader):
        self.written.append((prediction, indices, batch, batch_idx, loader))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.written.append((predictions, indices))


def files(keeper, *_):
    """What a ModelCheckpoint wrote and what it knows."""
    names = sorted(path.name for path in Path(keeper.dirpath).iterdir())
    best = {Path(path).name: float(score) for path, score in keeper.best_k_models.items()}
    return names, best, Path(keeper.best_model_path).name, float(keeper.best_model_score)


def predictions(writer, trainer, module):
    trainer.predict(module, DataLoader(vectors(21)[0], 8))
    return writer.written


def logged(_, trainer, __):
    return trainer.logger.rows


def shown(bar, *_):
    return bar.shown


@dataclass
class Case:
    """A callback of a run, and what of it must be the same; ``everywhere``: on every rank."""

    run: str
    make: Callable[[Path], L.Callback]
    look: Callable[..., Any]
    everywhere: bool = True


CASES = {
    "ModelCheckpoint by value": Case(
        "tqdm",
        lambda p: cb.ModelCheckpoint(
            p / "value", "{epoch}-{val_loss:.5f}", "val_loss", save_top_k=2, save_last=True
        ),
        files,
    ),
    "TQDMProgressBar": Case("tqdm", lambda _: Tqdm(), shown, everywhere=False),
    "ModelSummary": Case(
        "tqdm", lambda _: speaks(cb.ModelSummary), lambda c, *_: c.text.getvalue(), everywhere=False
    ),
    "ThroughputMonitor": Case(
        "tqdm",
        lambda _: cb.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
        logged,
        everywhere=False,
    ),
    "LambdaCallback": Case(
        "tqdm",
        lambda _: cb.LambdaCallback(
            on_train_batch_end=lambda trainer, _, outputs, batch, i: trainer.seen.append(
                (outputs, batch, i)
            )
        ),
        lambda _, trainer, __: trainer.seen,
    ),
    "Callback": Case("tqdm", lambda _: Hears(), lambda c, *_: c.heard),
    "ModelCheckpoint by step": Case(
        "rich",
        lambda p: cb.ModelCheckpoint(
            p / "step", monitor="loss_step", save_top_k=2, every_n_train_steps=2
        ),
        files,
    ),
    "RichProgressBar": Case("rich", lambda _: Rich(), shown, everywhere=False),
    "RichModelSummary": Case(
        "rich",
        lambda _: speaks(cb.RichModelSummary),
        lambda c, *_: c.text.getvalue(),
        everywhere=False,
    ),
    "DeviceStatsMonitor": Case("rich", lambda _: cb.DeviceStatsMonitor(cpu_stats=True), logged),
    "SpikeDetection": Case(
        "rich",
        lambda p: cb.SpikeDetection(warmup=1, rtol=1e9, exclude_batches_path=str(p)),
        lambda c, *_: float(c.running_mean.compute()),
    ),
    "ProgressBar": Case("stopping", lambda _: Bar(), shown),
    "EarlyStopping": Case(
        "stopping",
        lambda _: cb.EarlyStopping("val_loss", min_delta=0.002, patience=1),
        lambda c, trainer, _: (trainer.global_step, c.state_dict()),
    ),
    "BasePredictionWriter": Case("stopping", lambda _: Writer(), predictions, everywhere=False),
    "GradientAccumulationScheduler": Case(
        "accumulating",
        lambda _: cb.GradientAccumulationScheduler({0: 1, 1: 2}),
        lambda _, trainer, __: trainer.global_step,
    ),
    "BackboneFinetuning": Case(
        "tuning",
        lambda _: cb.BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_lr=0.01),
        lambda _, trainer, __: [g["lr"] for g in trainer.optimizers[0].param_groups],
    ),
    "Timer": Case(
        "timed",
        lambda _: cb.Timer(timedelta(seconds=3)),
        lambda c, trainer, _: (trainer.global_step, c.time_elapsed() > 0),
    ),
}
FLAGS = {
    "tqdm": ("enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
    "rich": ("enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
    "stopping": ("enable_progress_bar",),
}


def environment(module):
    """What the machine says is the same in every run, but ranks have other clocks."""
    own_clock(module)
    throughput_monitor.time = SimpleNamespace(perf_counter=itertools.count(0, 0.5).__next__)
    CPUAccelerator.get_device_stats = lambda self, device: {"percent": 1.0}
    L.Trainer.seen = []


def script(run, path):
    cases = {name: case for name, case in CASES.items() if case.run == run}
    callbacks = {name: case.make(path) for name, case in cases.items()}
    return Script(
        Shown,
        lambda: vectors(53),
        trainer={
            "callbacks": list(callbacks.values()),
            "logger": Rows(),
            "log_every_n_steps": 1,
            "max_steps": -1,
            "max_epochs": 40 if run == "stopping" else 3,
            "limit_val_batches": 2,
            **dict.fromkeys(FLAGS.get(run, ()), True),
        },
        setup=environment,
        after=lambda trainer, module: {
            name: case.look(callbacks[name], trainer, module) for name, case in cases.items()
        },
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both runs of a kind, made once for all its callbacks."""

    @functools.cache
    def both(run):
        folder = tmp_path_factory.mktemp(run)
        return script(run, folder / "plain").plain(), script(run, folder / "own").pipelined(2)

    return both


@pytest.mark.parametrize("name", CASES)
def test_callback_equals_one_device(name, runs):
    expected, pipelined = runs(CASES[name].run)
    assert expected.extra[name]
    for rank, run in enumerate(pipelined):
        assert distance(run, expected) <= TOLERANCE
        if CASES[name].everywhere or rank == 0:
            assert_same(run.extra[name], expected.extra[name])


def test_throughput_counts_replicas(tmp_path):
    """Four ranks see as many samples a second as the two replicas that they make up."""
    expected = script("tqdm", tmp_path / "plain").plain(2).extra["ThroughputMonitor"]
    assert any("train/samples_per_sec" in row for _, row in expected)
    runs = script("tqdm", tmp_path / "own").pipelined(2, 2)
    assert_same(runs[0].extra["ThroughputMonitor"], expected)


class Rates(L.Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_end(self, trainer, *_):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def exponential(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.7)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)


SCHEDULERS = {
    "every second epoch": (exponential, {"frequency": 2}),
    "every step": (
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        {"interval": "step", "name": "cycle"},
    ),
    "plateau of epochs": (plateau, {"monitor": "val_loss"}),
    "plateau of steps": (plateau, {"monitor": "loss_step", "interval": "step", "frequency": 2}),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_equal_one_device(name):
    """With what the LearningRateMonitor logs."""
    monitor = cb.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    made = Script(
        Shown,
        lambda: vectors(53),
        trainer={
            "callbacks": [monitor, Rates()],
            "logger": Rows(),
            "log_every_n_steps": 1,
            "max_steps": -1,
            "max_epochs": 4,
        },
        setup=lambda module: setattr(module, "scheduler", SCHEDULERS[name]),
        after=lambda trainer, _: (trainer.logger.rows, trainer.callbacks[1].rates),
    )
    expected = made.plain()
    assert len({str(rates) for rates in expected.extra[1]}) > 1
    runs = made.pipelined(2)
    for run in runs:
        assert distance(run, expected) <= TOLERANCE
        assert_same(run.extra[1], expected.extra[1])
    assert_same(runs[0].extra, expected.extra)
