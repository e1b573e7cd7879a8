"""Every argument of the Trainer does what it does on one device, or is refused."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.feeds import Several, own_clock
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


class Steps(Perceptron):
    """Has all four steps."""

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


class Diary(L.Callback):
    """Notes every hook at which the loops may go another way, with what is known there."""

    def __init__(self):
        self.pages = []

    def note(self, hook, trainer, batch_idx=None):
        known = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.pages.append((hook, trainer.current_epoch, trainer.global_step, batch_idx, known))

    def on_sanity_check_start(self, trainer, module):
        self.note("sanity", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.note(f"train {float(batch[0].sum()):.9g}", trainer, batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note(f"validate {float(batch[0].sum()):.9g}", trainer, batch_idx)

    def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note("test", trainer, batch_idx)

    def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note(f"predict {float(outputs.sum()):.9g}", trainer, batch_idx)

    def on_train_epoch_end(self, trainer, module):
        self.note("epoch", trainer)


class StopsAtOnce(L.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = True


def same_pages(seen, wanted):
    assert [page[:4] for page in seen] == [page[:4] for page in wanted]
    for page, other in zip(seen, wanted, strict=True):
        assert page[4] == pytest.approx(other[4], rel=1e-10)


def after(trainer, module):
    """Tests and predicts with the same trainer."""
    if not trainer.barebones:
        data = DataLoader(vectors(8)[0], 2)
        trainer.test(module, data, verbose=False)
        trainer.predict(module, data)
    return [page for callback in trainer.callbacks for page in getattr(callback, "pages", ())]


STOP = {"callbacks": [StopsAtOnce]}
FLAGS = {
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run, a number": {"fast_dev_run": 2},
    "max_epochs": {"max_epochs": 2},
    "min_epochs": {"min_epochs": 2, "max_epochs": 3, **STOP},
    "max_steps": {"max_steps": 4},
    "min_steps": {"min_steps": 5, **STOP},
    "max_time": {"max_time": "00:00:00:05"},
    "limit batches, whole": {
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "limit_test_batches": 2,
        "limit_predict_batches": 3,
    },
    "limit batches, share": {
        "max_epochs": 1,
        "limit_train_batches": 0.6,
        "limit_val_batches": 0.5,
        "limit_test_batches": 0.25,
        "limit_predict_batches": 0.75,
    },
    "limit batches, none": {
        "max_epochs": 1,
        "limit_val_batches": 0,
        "limit_test_batches": 0,
        "limit_predict_batches": 0,
    },
    "overfit_batches, whole": {"max_epochs": 2, "overfit_batches": 1},
    "overfit_batches, share": {"max_epochs": 2, "overfit_batches": 0.5},
    "val_check_interval, whole": {"max_epochs": 1, "val_check_interval": 2},
    "val_check_interval, share": {"max_epochs": 2, "val_check_interval": 0.5},
    "val_check_interval over epochs": {
        "max_epochs": 3,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
    },
    "val_check_interval, time": {"max_epochs": 2, "val_check_interval": "00:00:00:03"},
    "check_val_every_n_epoch": {"max_epochs": 4, "check_val_every_n_epoch": 2},
    "num_sanity_val_steps, none": {"max_epochs": 1, "num_sanity_val_steps": 0},
    "num_sanity_val_steps, all": {"max_epochs": 1, "num_sanity_val_steps": -1},
    "accumulate_grad_batches": {"max_epochs": 2, "accumulate_grad_batches": 3},
    "gradient_clip_val": {"max_epochs": 1, "gradient_clip_val": 0.01},
    "gradient_clip_algorithm": {
        "max_epochs": 1,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "deterministic": {"max_steps": 2, "deterministic": True},
    "deterministic, warn": {"max_steps": 2, "deterministic": "warn"},
    "benchmark": {"max_steps": 2, "benchmark": True},
    "inference_mode": {"max_epochs": 1, "inference_mode": False},
    "detect_anomaly": {"max_steps": 2, "detect_anomaly": True},
    "barebones": {"max_steps": 2, "barebones": True},
    "enable_autolog_hparams": {"max_steps": 2, "enable_autolog_hparams": False},
    "enable_model_summary": {"max_steps": 1, "enable_model_summary": True},
    "enable_progress_bar": {"max_steps": 1, "enable_progress_bar": True},
    "use_distributed_sampler": {"max_epochs": 1, "use_distributed_sampler": False},
    "callbacks": {"max_epochs": 5, "callbacks": [lambda: EarlyStopping("val_loss", patience=1)]},
}


GROUPS = {
    "duration": ("fast", "max_", "min_", "callbacks"),
    "validation": ("val_", "check_", "num_", "inference"),
    "batches": ("limit", "overfit", "accumulate", "use_"),
    "surroundings": ("gradient", "enable", "bench", "detect", "barebones", "deterministic"),
}


def flagged(flags):
    own = [] if "barebones" in flags else [Diary()]
    callbacks = [*own, *(make() for make in flags.get("callbacks", ()))]
    trainer = {"max_steps": -1, "max_epochs": 2, **flags, "callbacks": callbacks}
    if "barebones" in flags:  # it takes over what the tests turn off
        trainer |= dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), None)
        trainer |= {"enable_progress_bar": None, "num_sanity_val_steps": None}
    return Script(Steps, lambda: vectors(53), trainer=trainer, setup=own_clock, after=after)


@pytest.mark.parametrize("group", GROUPS)
def test_flags_equal_one_device(group):
    cases = {name: flagged(FLAGS[name]) for name in FLAGS if name.startswith(GROUPS[group])}
    assert cases
    for expected, runs in Several(cases).compare().values():
        for run in runs:
            same_pages(run.extra, expected.extra)


def test_every_flag_is_in_a_group():
    assert all(name.startswith(sum(GROUPS.values(), ())) for name in FLAGS)


# ---- where the ranks run


def on_two_nodes(script, strategy):
    """Ranks 0 and 1 on the first node, 2 and 3 on the second one, as torchrun starts them."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    run = script(strategy, 2)
    return run, rank


def where(trainer, module):
    return trainer.world_size, trainer.node_rank, trainer.local_rank, trainer.num_nodes


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_nodes(replicas):
    def make(**trainer):
        trainer |= {"limit_val_batches": 0}
        return Script(Perceptron, lambda: vectors(96), trainer=trainer, after=where)

    expected = make().plain(replicas)
    strategy = {"data_parallel_size": replicas}
    for run, rank in run_ranks(4, on_two_nodes, make(num_nodes=2), strategy):
        assert distance(run, expected) <= TOLERANCE
        assert run.extra == (4, rank // 2, rank % 2, 2)


@pytest.mark.parametrize("devices", [1, "auto"])
def test_one_device_is_one_stage(devices):
    script = Script(Perceptron, lambda: vectors(48))
    [run] = run_ranks(1, script, "pipeline", devices)
    assert distance(run, script.plain()) <= TOLERANCE


def test_registered_names():
    names = [name for name in StrategyRegistry.available_strategies() if "pipeline" in name]
    assert len(names) == 3 + len(SCHEDULES)
    for name in names:
        trainer = L.Trainer(accelerator="auto", devices=2, strategy=name, logger=False)
        assert isinstance(trainer.strategy, PipelineStrategy)


def test_other_accelerators_are_refused_by_lightning(monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    with pytest.raises(ValueError, match="DDP family are not supported on the MPS accelerator"):
        L.Trainer(accelerator=MPSAccelerator(), devices=1, strategy=PipelineStrategy())


# ---- what a run writes


class Logs(Steps):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 12})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss


def table(folder):
    with next(Path(folder).rglob("metrics.csv")).open() as lines:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]


def scalars(folder):
    events = EventAccumulator(str(next(Path(folder).rglob("events.out.*")).parent))
    events.Reload()
    names = events.Tags()["scalars"]
    return [{e.step: e.value for e in events.Scalars(name)} for name in sorted(names)]


LOGGERS = {
    "csv": (CSVLogger, table),
    "tensorboard": (TensorBoardLogger, scalars),
    "default": (lambda folder: True, scalars),
}


def test_loggers_write_the_same_rows(tmp_path):
    def make(kind, name):
        folder = tmp_path / kind / name
        trainer = {
            "logger": LOGGERS[name][0](str(folder)),
            "default_root_dir": str(folder),
            "log_every_n_steps": 2,
            "max_steps": 7,
        }
        return Script(Logs, lambda: vectors(53), trainer=trainer)

    Several({name: make("one", name) for name in LOGGERS}).plain()
    Several({name: make("two", name) for name in LOGGERS}).pipelined(2)
    for name, (_, read) in LOGGERS.items():
        expected, rows = read(tmp_path / "one" / name), read(tmp_path / "two" / name)
        assert len(expected) > 3
        assert rows == [pytest.approx(row, rel=1e-7) for row in expected]


PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def test_profilers_report_on_every_rank(tmp_path):
    def make(name):
        profiler = PROFILERS[name](dirpath=str(tmp_path), filename=name)
        return Script(Steps, lambda: vectors(48), trainer={"profiler": profiler, "max_steps": 6})

    Several({name: make(name) for name in PROFILERS}).compare()
    for name in PROFILERS:
        for rank in (0, 1):
            assert "run_training_batch" in (tmp_path / f"fit-{name}-{rank}.txt").read_text()


class Counted(TorchCheckpointIO):
    def __init__(self):
        self.saved = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved.append((Path(path).name, sorted(checkpoint["state_dict"])))
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("wrapped", [False, True])
def test_plugins_write_the_checkpoints(tmp_path, wrapped):
    def make(kind):
        plugin = Counted()
        trainer = {
            "plugins": [AsyncCheckpointIO(plugin) if wrapped else plugin],
            "enable_checkpointing": True,
            "default_root_dir": str(tmp_path / kind),
        }
        return Script(
            Perceptron, lambda: vectors(48), trainer=trainer, after=lambda *_: plugin.saved
        )

    expected = make("one").plain()
    [first, *others] = make("two").pipelined(2)
    assert first.extra == expected.extra and len(first.extra) == 2
    assert all(run.extra == [] for run in others)


def test_model_registry_is_lightnings():
    """A name in the registry only adds a callback, which is not installed here."""
    script = Script(Steps, lambda: vectors(48), trainer={"model_registry": "name"})
    assert distance(script.pipelined(2)[0], script.plain()) <= TOLERANCE


# ---- the tuner


def tuned(method, strategy, devices):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)

    class Tuned(Perceptron):
        def __init__(self):
            super().__init__()
            self.learning_rate, self.batch_size = 0.05, 8

        def train_dataloader(self):
            return DataLoader(vectors(96)[0], self.batch_size)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.learning_rate)

    module = Tuned()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="/tmp",
    )
    if method == "scale_batch_size":
        return Tuner(trainer).scale_batch_size(module)
    found = Tuner(trainer).lr_find(module, num_training=20)
    trainer.fit(module)
    return found.results["loss"], found.suggestion(), module.learning_rate


def test_lr_find_suggests_the_same():
    [(losses, suggestion, rate)] = run_ranks(1, tuned, "lr_find", "auto", 1)
    assert suggestion is not None
    for found in run_ranks(2, tuned, "lr_find", "pipeline", 2):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1:] == pytest.approx((suggestion, rate), rel=1e-12)


def test_scale_batch_size_is_refused():
    message = "Tuning the batch size is currently not supported with distributed strategies"
    with pytest.raises(RankFailed, match=message):
        run_ranks(2, tuned, "scale_batch_size", "pipeline", 2, deadline=30)
