"""Checkpoints that are damaged, incomplete or of something else: the error says which and where."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import resource
import shutil
import signal
import time
import zlib
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipeline import sharded
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.files import WholeFiles
from lightning_pipeline.replacing import beside, put
from lightning_pipeline.sharded import consolidate, is_folder, load
from lightning_pipeline.shards import Shards
from tests.distributed.fits import Script
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import vectors
from tests.models.modules import Perceptron

BIAS, MOMENTUM = "net.0.bias", "exp_avg of net.0.bias"


class Saved(Perceptron):
    """With the state of AdamW."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Saves(Script):
    """Writes a checkpoint as a file and as a folder, each in two runs."""

    def __call__(self, strategy, devices):
        def after(trainer, module):
            for folders, name in ((False, "file"), (True, "folder")):
                trainer.strategy._shards_checkpoints = folders
                trainer.save_checkpoint(self.checkpoint / name)
                trainer.save_checkpoint(self.checkpoint / f"another {name}")

        script = Script(Saved, self.dataset, trainer=self.trainer, after=after)
        script(strategy, devices)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trainer = {"limit_val_batches": 0, "max_steps": 2}
    Saves(Saved, lambda: vectors(32), trainer=trainer, checkpoint=folder).pipelined(2)
    return folder


def cut(path, name):
    """The file ends in the middle."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path, name):
    """A bit of a tensor is another one."""
    checkpoint = torch.load(name, weights_only=True) if name.is_file() else None
    source = consolidate(name, name.with_suffix(".plain")) if checkpoint is None else name
    state = torch.load(source, weights_only=True)["state_dict"]
    needle = state[BIAS].numpy().tobytes()
    data = path.read_bytes()
    at = data.index(needle)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def empty(path, name):
    path.write_bytes(b"")


def foreign(path, name):
    path.write_bytes(b"a picture of a cat")


def no_lightning(path, name):
    torch.save({"net.0.bias": torch.zeros(2)}, path)


def gone(path, name):
    path.unlink()


def of_another_save(path, name):
    shutil.copy(name.with_name("another folder") / path.name, path)


def changed(change):
    """A checkpoint that was written whole, with something else in it."""

    def make(path, name):
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path)

    return make


def _shape(checkpoint):
    checkpoint["state_dict"][BIAS] = torch.zeros(3, dtype=torch.float64)


def _lacking(checkpoint):
    del checkpoint["state_dict"][BIAS]


def _momentum(checkpoint):
    checkpoint["optimizer_states"][0]["state"][2]["exp_avg"] = torch.zeros(3, dtype=torch.float64)


def _no_optimizer(checkpoint):
    checkpoint["optimizer_states"] = []


def _fewer(checkpoint):
    checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("evil",))


def evil(path, name):
    path.write_bytes(pickle.dumps(Evil()))


def evil_list(path, name):
    """As somebody makes it who means it."""
    evil(path, name)
    changed(_checksum(path))(name / "meta.pt", name)


def cut_list(path, name):
    """By somebody who wrote its checksum after it."""
    cut(path, name)
    changed(_checksum(path))(name / "meta.pt", name)


def _checksum(path):
    def change(checkpoint):
        checkpoint["lightning_pipeline"]["list"] = zlib.crc32(path.read_bytes())

    return change


# Which checkpoint, which file of it, what happens to it, and what is said.
FAULTS = {
    "cut": ("file", "", cut, r"/file' is cut short: it ends after \d+ bytes"),
    "empty": ("file", "", empty, r"/file' is empty\. Continue from another"),
    "flipped": ("file", "", flip, rf"/file' is damaged in state_dict\.{BIAS}: it was changed"),
    "foreign": ("file", "", foreign, r"/file' must be a file that torch\.save wrote.*a pictur"),
    "weights": ("file", "", no_lightning, r"/file' must be a checkpoint of Lightning.*weights="),
    "objects": ("file", "", evil, r"/file' must be a file that torch\.save wrote"),
    "shape": ("file", "", changed(_shape), rf"/file' must be of Saved.*{BIAS}.*\[?3"),
    "name": ("file", "", changed(_lacking), rf'/file\' must be of Saved.*"{BIAS}"'),
    "momentum": ("file", "", changed(_momentum), rf"{MOMENTUM} has shape \(3,\) there"),
    "no optimizer": ("file", "", changed(_no_optimizer), r"state of 0 optimizers, and .* gives 1"),
    "parameters": ("file", "", changed(_fewer), r"optimizer 0 has groups of \[\d+\] parameters"),
    "folder, cut": ("folder", "__1_0.distcp", cut, r"__1_0\.distcp' must have \d+ bytes for "),
    "folder, flipped": ("folder", "__1_0.distcp", flip, rf"damaged in state_dict\.{BIAS}: it was"),
    "folder, gone": ("folder", "__1_0.distcp", gone, r"/folder' lacks __1_0\.distcp, with state"),
    "folder, of another": (
        *("folder", "__1_0.distcp", of_another_save),
        r"__1_0\.distcp' must be of the same save as the files beside it",
    ),
    "folder, foreign": ("folder", "__1_0.distcp", foreign, r"__1_0\.distcp' must have \d+ bytes"),
    "rest, gone": ("folder", "meta.pt", gone, r"/folder' must be a checkpoint .* lacks meta\.pt"),
    "rest, cut": ("folder", "meta.pt", cut, r"meta\.pt' is cut short"),
    "rest, of another": ("folder", "meta.pt", of_another_save, r"must be of the same save"),
    "list, gone": ("folder", ".metadata", gone, r"must be a checkpoint .* lacks \.metadata"),
    "list, cut": ("folder", ".metadata", cut, r"metadata' must be of the same save as the files"),
    "list, unreadable": (
        *("folder", ".metadata", cut_list),
        r"metadata' must be the list of tensors that torch",
    ),
    "list, objects": ("folder", ".metadata", evil_list, r"it asks for posix\.mkdir, which no list"),
}


class Reads(Script):
    """What is said on each rank."""

    def __call__(self, strategy, devices):
        with pytest.raises((RuntimeError, FileNotFoundError)) as caught:
            super().__call__(strategy, devices)
        return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_by_file_and_tensor(saved, tmp_path, monkeypatch, fault):
    """On every rank, and nothing that is no tensor or plain value is made."""
    monkeypatch.chdir(tmp_path)
    kind, file, damage, message = FAULTS[fault]
    copy = shutil.copytree(saved, tmp_path / "saved") / kind
    damage(copy / file, copy)
    trainer = {"limit_val_batches": 0, "max_steps": 3}
    script = Reads(Saved, lambda: vectors(32), trainer=trainer, checkpoint=copy)
    for said in script.pipelined(2, deadline=30):
        assert re.search(message, said, re.DOTALL), said
    assert not (tmp_path / "evil").exists()


class Spread(Script):
    """Goes on, with a module that is spread over the ranks, from a file that does not fit."""

    def __call__(self, strategy, devices):
        def after(trainer, module):
            trainer.fit_loop.epoch_loop.max_steps = 4
            with pytest.raises(CheckpointError) as caught:
                trainer.fit(module, self.loader(self.dataset()[0]), ckpt_path=self.checkpoint)
            return str(caught.value)

        return Script(Saved, self.dataset, trainer=self.trainer, after=after)(strategy, devices)


def test_all_ranks_refuse_the_shape_that_one_of_them_holds(saved, tmp_path):
    path = shutil.copy(saved / "file", tmp_path / "file")
    changed(_shape)(path, path)
    trainer = {"limit_val_batches": 0, "max_steps": 2}
    script = Spread(Saved, lambda: vectors(32), trainer=trainer, checkpoint=path)
    for run in script.pipelined(2, gather_after_run=False, deadline=30):
        assert re.search(rf"size mismatch for {BIAS}", run.extra), run.extra


class Unwritable(L.Callback):
    """Saves when a rank's files must not grow; then there is room again."""

    def __init__(self, path, rank):
        self.path, self.rank, self.said = path, rank, None

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step != 2:
            trainer.save_checkpoint(self.path)
            return
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with contextlib.ExitStack() as stack:
            if trainer.global_rank == self.rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
                stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
            with pytest.raises(CheckpointError) as caught:
                trainer.save_checkpoint(self.path)
        self.said = str(caught.value)
        beside = sorted(path.name for path in self.path.parent.iterdir())
        step = torch.load(self.path / "meta.pt" if is_folder(self.path) else self.path)
        trainer.strategy.barrier()
        assert beside == [self.path.name] and step["global_step"] == 1


@pytest.mark.parametrize(
    ("folders", "rank", "replicas"),
    [(False, 0, 1), (True, 0, 1), (True, 1, 1), (True, 2, 2)],
    ids=["file", "folder, rank 0", "folder, rank 1", "folder, replicas"],
)
def test_a_full_disk_is_told_to_all_ranks(tmp_path, folders, rank, replicas):
    """The checkpoint before it stays, nothing lies beside it, and the next save is as ever."""
    path = tmp_path / "saved"
    trainer = {"limit_val_batches": 0, "max_steps": 3, "callbacks": [Unwritable(path, rank)]}
    script = Script(
        lambda: Saved(width=16),
        lambda: vectors(32 * replicas),
        trainer=trainer,
        after=lambda trainer, _: trainer.callbacks[0].said,
    )
    runs = script.pipelined(2, replicas, save_distributed_checkpoint=folders, deadline=40)
    for run in runs:
        assert re.search(r"saved'? must be written in full", run.extra), run.extra
        # Of the first replica, by its stages: rank 0 has the last one.
        assert rank == 0 or "__0_0.distcp: " in run.extra, run.extra
    assert os.listdir(tmp_path) == ["saved"]
    last = torch.load(path / "meta.pt" if folders else path, weights_only=True)
    assert last["global_step"] == 3


class Own(WholeFiles):
    """A user's own way of writing."""

    calls: list[str]

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append("save")
        super().save_checkpoint({**checkpoint, "mine": storage_options}, path)

    def load_checkpoint(self, path, *args, **kwargs):
        self.calls.append("load")
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path):
        self.calls.append("remove")
        super().remove_checkpoint(path)


def looks(path):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from lightning_pipeline import PipelineStrategy

    own, inside = Own(), TorchCheckpointIO()
    own.calls = []
    strategy = PipelineStrategy(1)
    seen = [type(strategy.checkpoint_io).__name__]
    for plugin in (own, inside, AsyncCheckpointIO(), AsyncCheckpointIO(own)):
        strategy.checkpoint_io = plugin
        seen.append(strategy.checkpoint_io is plugin)
        seen.append(type(getattr(plugin, "checkpoint_io", plugin)).__name__)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PipelineStrategy(1),
        plugins=[own],
        max_steps=1,
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(Saved(), torch.utils.data.DataLoader(vectors(32)[0], 16))
    for place in (path / "x", "memory://x"):
        trainer.save_checkpoint(place, storage_options="some" if place == path / "x" else None)
        trainer.strategy.load_checkpoint(place)
        trainer.strategy.remove_checkpoint(place)
    return seen, own.calls


def test_the_users_own_way_of_writing_stays(tmp_path):
    torch.set_default_dtype(torch.float32)
    [(seen, calls)] = run_ranks(1, _in_double, looks, tmp_path)
    assert seen == [
        "WholeFiles",
        *(True, "Own"),
        *(True, "TorchCheckpointIO"),
        *(True, "WholeFiles"),
        *(True, "Own"),
    ]
    assert calls[-6:] == ["save", "load", "remove"] * 2
    assert not list(tmp_path.iterdir())


def _in_double(function, *args):
    torch.set_default_dtype(torch.float64)
    os.chdir(args[0])
    result = function(*args)
    shutil.rmtree("checkpoints", ignore_errors=True)
    return result


def test_objects_need_trust(tmp_path):
    path = tmp_path / "saved"
    path.mkdir()
    checkpoint = {"epoch": nn.Identity(), "pytorch-lightning_version": L.__version__}
    WholeFiles().save_checkpoint(checkpoint, path / "file")
    with pytest.raises(pickle.UnpicklingError, match=r"In '.*/file': .*Weights only load failed"):
        WholeFiles().load_checkpoint(path / "file")
    loaded = WholeFiles().load_checkpoint(path / "file", weights_only=False)
    assert isinstance(loaded["epoch"], nn.Identity)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A folder of a later step, which a run that goes on saves."""
    folder = tmp_path_factory.mktemp("other")
    trainer = {"limit_val_batches": 0, "max_steps": 4}
    Saves(Saved, lambda: vectors(32), trainer=trainer, checkpoint=folder).pipelined(2)
    return folder / "folder"


def replace_by(source, path):
    """What the next save of another run does."""
    shutil.copytree(source, beside(path))
    put(beside(path), path)


def test_a_folder_that_is_replaced_while_it_is_read_is_read_as_it_was(
    saved, other, tmp_path, monkeypatch
):
    path = shutil.copytree(saved / "folder", tmp_path / "last.ckpt")
    expected, later = (load(folder)["state_dict"] for folder in (path, other))
    assert not torch.equal(expected[BIAS], later[BIAS])
    whole, reads = Shards.read, itertools.count()

    def read(shards, name):
        if next(reads) == 4:  # behind those of the number of the save
            replace_by(other, path)
        return whole(shards, name)

    monkeypatch.setattr(Shards, "read", read)
    found = load(path)["state_dict"]
    assert next(reads) > 8 and all(torch.equal(found[name], expected[name]) for name in expected)
    monkeypatch.undo()
    assert torch.equal(load(path)["state_dict"][BIAS], later[BIAS])


def test_a_tensor_that_comes_in_parts_is_read_in_full(saved, monkeypatch):
    expected, whole = load(saved / "folder")["state_dict"], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: whole(file, min(size, 1000), at))
    found = load(saved / "folder")["state_dict"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class ReadsLater(Reads):
    """Rank 1 reads the folder when another save has taken the place of what rank 0 reads."""

    def __call__(self, strategy, devices):
        whole, path = Shards.check, Path(self.checkpoint)
        done = path.with_name("done")

        def check(shards, *args):
            whole(shards, *args)
            replace_by(path.with_name("other"), path)
            done.touch()

        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == "0":
                patch.setattr(Shards, "check", check)
            else:
                patch.setattr(sharded, "is_folder", lambda path: wait_for(done) or is_folder(path))
            return super().__call__(strategy, devices)


def wait_for(path):
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def test_ranks_that_would_read_two_saves_refuse(saved, other, tmp_path):
    path = shutil.copytree(saved / "folder", tmp_path / "last.ckpt")
    shutil.copytree(other, tmp_path / "other")
    trainer = {"limit_val_batches": 0, "max_steps": 6}
    script = ReadsLater(Saved, lambda: vectors(32), trainer=trainer, checkpoint=path)
    for said in script.pipelined(2, deadline=30):
        assert "All ranks must read the same save from" in said
