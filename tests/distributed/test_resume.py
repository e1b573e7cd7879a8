"""A run that goes on from a checkpoint, in whatever layout, is the run that never stopped.

Every layout gets the same batches: a replica has every other row of a batch that is twice its own.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import shutil
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.sharded import consolidate, is_folder
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron

BATCH, EPOCHS, SAVED = 16, 3, "epoch=1.ckpt"

# Ranks of a pipeline, replicas, arguments of the strategy; None is plain Lightning.
LAYOUTS = {
    "single": (1, 1, None),
    "ddp2": (1, 2, None),
    "pp2": (2, 1, {}),
    "pp4": (4, 1, {"schedule": "GPipe"}),
    "pp2xdp2": (2, 2, {}),
    "v": (2, 1, {"schedule": "ZBVZeroBubble"}),
    "cut": (2, 1, {"partition": ["net.4"]}),
}
FOLDERS = {"pp2 folder": "pp2", "pp2xdp2 folder": "pp2xdp2"}
SOURCES = {**{name: name for name in LAYOUTS}, **FOLDERS}


class Scheduled(Perceptron):
    """With momenta, a rate that changes at steps and epochs, and a loss of all replicas."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.scale * self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


def make_trainer(layout, folder, *callbacks, **arguments):
    """A trainer in a layout."""
    ranks, replicas, strategy = LAYOUTS[layout]
    if strategy is not None:
        folders = folder.name in FOLDERS
        strategy = {"num_microbatches": 2, "save_distributed_checkpoint": folders, **strategy}
        strategy = PipelineStrategy(ranks, **strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    return L.Trainer(
        accelerator="cpu",
        devices=ranks * replicas,
        strategy=strategy or ("auto" if replicas == 1 else "ddp_find_unused_parameters_true"),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        callbacks=list(callbacks),
        **{"max_epochs": EPOCHS, "use_distributed_sampler": False, **arguments},
        num_sanity_val_steps=0,
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )


def loaders(layout):
    replicas = LAYOUTS[layout][1]

    def loader(data):
        own = dist.get_rank() % replicas
        sampler = DistributedSampler(data, replicas, own, shuffle=False)
        return DataLoader(data, BATCH // replicas, sampler=sampler)

    training, validation = vectors(3 * BATCH)
    return loader(training), loader(torch.utils.data.Subset(validation, range(BATCH)))


def run(layout, folder, checkpoint=None):
    """Trains, from a checkpoint if there is one; returns the checkpoint of the end."""
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "top", ignore_errors=True)
        shutil.rmtree(folder / "all", ignore_errors=checkpoint is None)
    dist.barrier()
    trainer = make_trainer(
        layout,
        folder,
        EarlyStopping("val_loss", patience=20),
        ModelCheckpoint(folder / "top", "{epoch}", monitor="val_loss", save_top_k=2),
        ModelCheckpoint(folder / "all", "{epoch}", save_top_k=-1),
    )
    trainer.fit(Scheduled(width=8, depth=5), *loaders(layout), ckpt_path=checkpoint)
    end = folder / f"{layout}.{'end' if checkpoint is None else 'again'}"
    trainer.save_checkpoint(end)
    if dist.get_rank():
        return None
    return torch.load(consolidate(end) if end.is_dir() else end, weights_only=True)


def all_sources(layout, folders, checkpoints):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    return [run(layout, *each) for each in zip(folders, checkpoints, strict=True)]


def in_ranks(layout, folders, checkpoints):
    ranks, replicas, _ = LAYOUTS[layout]
    return run_ranks(ranks * replicas, all_sources, layout, folders, checkpoints)[0]


class Journeys:
    """Uninterrupted and resumed runs, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.whole = functools.cache(self._whole)
        self._resumed = functools.cache(self._resume_from_all)

    def _whole(self, source):
        """Ends of uninterrupted runs, which leave the checkpoints."""
        layout = SOURCES[source]
        folder = self._folder / source
        [end] = in_ranks(layout, [folder], [None])
        saved = folder / "all" / SAVED
        kept = self._folder / f"{source}.ckpt"
        saved.rename(kept)
        if is_folder(kept):
            consolidate(kept, self._folder / f"{source}.plain")
        return end

    def _resume_from_all(self, layout):
        paths = []
        for source in SOURCES:
            self.whole(source)
            path = self._folder / f"{source}.ckpt"
            plain = LAYOUTS[layout][2] is None and is_folder(path)
            paths.append(path.with_suffix(".plain") if plain else path)
        # In the folder that the callbacks remember.
        ends = in_ranks(layout, [self._folder / source for source in SOURCES], paths)
        return dict(zip(SOURCES, ends, strict=True))

    def resumed(self, source, target):
        """End of the run in layout ``target`` from a checkpoint of ``source``."""
        return self._resumed(target)[source]


@pytest.fixture(scope="module")
def journeys(tmp_path_factory):
    return Journeys(tmp_path_factory.mktemp("journeys"))


def differences(own, other, tolerance, path=()):
    """Paths at which two checkpoints differ; files go by their names."""
    if isinstance(other, Tensor):
        scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 0.0
        same = own.shape == other.shape and own.dtype == other.dtype
        if not same or bool(((own - other).abs() > tolerance * scale).any()):
            yield path
    elif isinstance(other, dict):
        if list(map(name_of, own)) != list(map(name_of, other)):
            yield path
            return
        for (_, mine), (key, theirs) in zip(own.items(), other.items(), strict=True):
            yield from differences(mine, theirs, tolerance, (*path, name_of(key)))
    elif isinstance(other, list | tuple):
        if len(own) != len(other):
            yield path
            return
        for index, (mine, theirs) in enumerate(zip(own, other, strict=True)):
            yield from differences(mine, theirs, tolerance, (*path, index))
    elif isinstance(other, float):
        if not math.isclose(own, other, rel_tol=tolerance, abs_tol=0.0):
            yield path
    elif name_of(own) != name_of(other):
        yield path


def name_of(value):
    return Path(value).name if isinstance(value, str) else value


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", LAYOUTS)
def test_any_layout_goes_on_from_any_other(journeys, source, target):
    """Weights, momenta, rates, loops, callbacks and the loss scale are those of one long run."""
    resumed = journeys.resumed(source, target)
    expected = journeys.whole("single")
    assert not list(differences(resumed, expected, TOLERANCE))
    if SOURCES[source] == target:
        assert not list(differences(resumed, journeys.whole(source), 0.0))


class Remembers:
    """A loader that knows how far it is, as torchdata's StatefulDataLoader does."""

    def __init__(self, data):
        self._loader, self._first, self._next = DataLoader(data, BATCH), 0, 0

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        first, self._first = self._first, 0
        for index, batch in enumerate(self._loader):
            if index >= first:
                self._next = index + 1
                yield batch

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._first = state["next"]


class Drops(Scheduled):
    """Its random numbers are those of the batch's number, however the run came there."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.net.insert(2, nn.Dropout(0.5))
        self.net.insert(6, nn.Dropout(0.5))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)), y)


# Whether the loader knows how far it is, the model, and arguments of the trainer.
MIDDLES = {
    "loader begins again": (False, Scheduled, {}),
    "loader goes on": (True, Scheduled, {}),
    "accumulating": (True, Scheduled, {"accumulate_grad_batches": 2}),
    "accumulating, loader begins again": (False, Scheduled, {"accumulate_grad_batches": 2}),
    "validation in the epoch": (True, Scheduled, {"val_check_interval": 3}),
    "random numbers": (True, Drops, {}),
}


def stop_and_go(layout, case, folder):
    """What is there after an uninterrupted run, and after one from the middle of its epoch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    remembers, model, arguments = MIDDLES[case]
    # The fourth of five batches, or the second of three steps, of the second epoch.
    step = 5 if "accumulate_grad_batches" in arguments else 9
    training, validation = vectors(5 * BATCH)
    ends = []
    for name, checkpoint in (("whole", None), ("resumed", folder / f"whole/step={step}.ckpt")):
        torch.manual_seed(0)
        saves = ModelCheckpoint(folder / name, "{step}", every_n_train_steps=step, save_top_k=-1)
        trainer = make_trainer(layout, folder, saves, **{"max_epochs": 2, **arguments})
        loader = Remembers(training) if remembers else DataLoader(training, BATCH)
        module = model(width=8, depth=3)
        trainer.fit(module, loader, DataLoader(validation, BATCH), ckpt_path=checkpoint)
        ends.append((copy.deepcopy(module.state_dict()), trainer.global_step))
    return ends


@pytest.mark.parametrize("case", MIDDLES)
def test_going_on_from_the_middle_of_an_epoch(tmp_path, case):
    remembers, model, _ = MIDDLES[case]
    layout = "v" if model is Drops else "pp2"
    runs = run_ranks(2, stop_and_go, layout, case, tmp_path / layout)
    if model is not Drops:
        [(whole, resumed)] = run_ranks(1, stop_and_go, "single", case, tmp_path / "single")
    for own_whole, own_resumed in runs:
        if model is not Drops:
            assert not list(differences(own_whole, whole, TOLERANCE))
            assert not list(differences(own_resumed, resumed, TOLERANCE))
        if remembers:
            assert not list(differences(own_resumed, own_whole, 0.0))
        else:  # it has seen other batches
            assert list(differences(own_resumed[0], own_whole[0], TOLERANCE))
