"""Runs whose processes are killed at any moment, also in a save, go on as if nothing had been.

A rank counts what it does to the files of its checkpoints and is killed (SIGKILL) before the n-th.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import resource
import signal
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.sharded import consolidate, is_folder
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import vectors
from tests.distributed.test_resume import BATCH, Drops, Remembers, differences

STEPS, EVERY = 8, 2
TRAINED = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "shutil.rmtree")

# Arguments of ModelCheckpoint, of the strategy, and of the Trainer's plugins.
WAYS = {
    "file": ({}, {}, []),
    "folder": ({}, {"save_distributed_checkpoint": True}, []),
    "link to a file": ({"save_last": "link"}, {}, []),
    "link to a folder": ({"save_last": "link"}, {"save_distributed_checkpoint": True}, []),
    "in a thread": ({}, {}, [AsyncCheckpointIO]),
    "in a thread, with a link": ({"save_last": "link"}, {}, [AsyncCheckpointIO]),
    "no exchange": ({}, {"save_distributed_checkpoint": True}, []),
}


class Saves(ModelCheckpoint):
    """Notes the step of each checkpoint that is there."""

    noted: Path

    def _save_last_checkpoint(self, trainer, *args):
        super()._save_last_checkpoint(trainer, *args)
        if trainer.is_global_zero:
            with open(self.noted, "a") as file:
                file.write(f"{self._last_global_step_saved}\n")


class Ends(L.Callback):
    """Kills before the n-th batch, and notes where a run begins."""

    def __init__(self, end, batch):
        self.end, self.batch, self.begun = end, batch, STEPS  # there may be no step left

    def on_train_start(self, trainer, module):
        self.begun = trainer.global_step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.batch:
            self.end()


def count_events(folder, number, end, renamed=None):
    """Ends before the ``number``-th event in the folder, or rename to a name; returns all."""
    numbers, seen = itertools.count(1), []

    def hook(event, args):
        place = any(
            isinstance(each, str | os.PathLike) and str(each).startswith(str(folder))
            for each in args
        )
        if (event in EVENTS and place) or (event == "ctypes.dlsym" and args[1] == "renameat2"):
            seen.append(event)
            renames = event == "os.rename" and os.path.basename(args[1]) == renamed
            if (renames or renamed is None) and next(numbers) == number:
                end()

    sys.addaudithook(hook)
    return seen


def run(way, folder, rank=None, event=None, renamed=None, batch=None, size=None, together=False):
    """Trains from the last checkpoint; a rank ends before an event, a batch, or at a file's size.

    Args:
        rank: The rank that ends; ``together`` takes the others with it.

    Returns:
        The step at which it began, and the number of events.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    own = int(os.environ["RANK"])
    (folder / f"{own}.pid").write_text(str(os.getpid()))

    def end():
        victims = range(2) if together else [own]
        for victim in sorted(victims, key=lambda each: each == own):
            os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)

    checkpoints = folder / "checkpoints"
    is_victim = own == rank
    seen = count_events(checkpoints, event if is_victim else None, end, renamed)
    if is_victim and size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process in the middle of a write
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    saving, strategy, plugins = WAYS[way]
    if way == "no exchange":
        from lightning_pipeline import replacing

        replacing._exchange = lambda *_: False
    torch.manual_seed(0)
    saves = Saves(checkpoints, "{step}", every_n_train_steps=EVERY, **{"save_last": True, **saving})
    saves.noted = folder / "noted"
    ends = Ends(end, batch if is_victim else None)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(2, num_microbatches=2, **strategy),
        plugins=[plugin() for plugin in plugins],
        callbacks=[saves, ends],
        max_steps=STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )
    module = Drops(width=8, depth=3)
    trainer.fit(module, Remembers(vectors(5 * BATCH)[0]), ckpt_path="last")
    trainer.save_checkpoint(folder / "end")
    trainer.strategy.checkpoint_io.teardown()  # waits for the thread
    return ends.begun, len(seen)


def train(way, folder, **when):
    folder.mkdir(exist_ok=True)
    return run_ranks(2, functools.partial(run, way, folder, **when), deadline=40)


def ended(folder):
    """What is trained, at the end."""
    path = folder / "end"
    file = consolidate(path, folder / "plain") if is_folder(path) else path
    checkpoint = torch.load(file, weights_only=True)
    return {name: checkpoint[name] for name in TRAINED}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Ends of runs that nobody killed, and their numbers of events by rank."""

    def make(way):
        folder = tmp_path_factory.mktemp("whole") / "run"
        runs = train(way, folder)
        assert [begun for begun, _ in runs] == [0, 0]
        return ended(folder), [number for _, number in runs]

    return functools.cache(make)


def goes_on(way, folder, expected, **when):
    """Kills a run and goes on; all that was saved before is there."""
    with pytest.raises(RankFailed, match=r"exit codes by rank: .*-(9|25)"):
        train(way, folder, **when)
    noted = folder / "noted"
    steps = [int(line) for line in noted.read_text().split()] if noted.exists() else []
    begun = train(way, folder)[0][0]
    if "thread" not in way:
        assert begun >= max(steps, default=0)
    else:  # the thread may not have been there yet with the last of them
        assert begun >= max(steps, default=0) - EVERY
    assert not list(differences(ended(folder), expected, 0.0))
    if begun < STEPS:  # there was a save, and a removal, behind
        assert not list(folder.glob("**/.*.part")) + list(folder.glob("**/*.being-*"))
    return begun


@pytest.mark.parametrize("together", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_killed_in_a_save(tmp_path, whole, way, together):
    expected, numbers = whole(way)
    draw = random.Random(f"{way} {together}")
    rank = draw.choice([rank for rank in range(2) if numbers[rank]])
    # The second half: there is something to lose. Either rank may be the one to make a folder.
    half = numbers[rank] // 2
    event = draw.randint(half, max(half, numbers[rank] - STEPS // EVERY))
    goes_on(way, tmp_path / "run", expected, rank=rank, event=event, together=together)


@pytest.mark.parametrize("together", [False, True], ids=["one", "all"])
def test_killed_when_nothing_is_in_its_place(tmp_path, whole, together):
    """Where folders cannot be exchanged, the old one leaves before the new one is there."""
    expected, _ = whole("no exchange")
    when = {"rank": 0, "renamed": "last.ckpt", "event": STEPS // EVERY, "together": together}
    assert goes_on("no exchange", tmp_path / "run", expected, **when) == STEPS - EVERY


@pytest.mark.parametrize("way", ["file", "folder"])
def test_killed_in_the_middle_of_a_file(tmp_path, whole, way):
    expected, _ = whole(way)
    assert goes_on(way, tmp_path / "run", expected, rank=0, size=2048) == 0


@pytest.mark.parametrize("together", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("way", ["file", "folder"])
def test_killed_between_saves(tmp_path, whole, way, together):
    expected, _ = whole(way)
    when = {"rank": 1, "batch": 5, "together": together}
    assert goes_on(way, tmp_path / "run", expected, **when) == 4
