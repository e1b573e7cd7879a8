"""Runs that end early: together or alone, and what is saved then."""

from __future__ import annotations

import json
import re
import sys
import traceback
from datetime import timedelta
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks as cb

from lightning_pipeline import failing, reporting
from lightning_pipeline.errors import PipelineError
from tests.distributed.fits import Script
from tests.distributed.ranks import RankFailed
from tests.distributed.test_averaging import assert_same
from tests.distributed.test_exactness import vectors
from tests.distributed.test_refusals import ValueDependentForward
from tests.models.modules import Perceptron


class Spikes(Script):
    def __call__(self, strategy, devices):
        with pytest.raises(TrainingSpikeException) as caught:
            super().__call__(strategy, devices)
        return str(caught.value)


def test_a_spike_ends_all_ranks_at_the_same_batch(tmp_path):
    def made(folder):
        spike = cb.SpikeDetection(warmup=1, rtol=None, exclude_batches_path=str(tmp_path / folder))
        return Spikes(Perceptron, lambda: vectors(160), trainer={"callbacks": [spike]})

    expected = made("plain").plain()
    assert "Training spike detected in batch" in expected
    assert made("own").pipelined(2) == [expected] * 2
    plain, own = (tmp_path / folder / "skip_batches.json" for folder in ("plain", "own"))
    assert json.loads(own.read_text()) == json.loads(plain.read_text())


class Fails(L.Callback):
    """Raises on some ranks after the second batch."""

    def __init__(self, ranks, error):
        self.ranks, self.error = ranks, error

    def setup(self, trainer, module, stage):
        self.trainer = trainer

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank in self.ranks:
            raise self.error("my own mistake")


class Asks(cb.Checkpoint):
    """Talks to the other ranks, after the callbacks that save."""

    def on_exception(self, trainer, module, exception):
        trainer.strategy.broadcast("are you there?")


class FailsInStep(Perceptron):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyError("my own mistake")
        return super().training_step(batch, batch_idx)


class Interrupted(Script):
    """What ends the run, by its name; ranks that lose a peer say so.

    With it comes what was said of checkpoints that were not written.
    """

    def __call__(self, strategy, devices):
        failing.PATIENCE, said = timedelta(seconds=1), []
        failing.warnings = SimpleNamespace(warn=lambda text, **_: said.append(text))
        try:
            super().__call__(strategy, devices)
        except BaseException as error:
            ended = error.__context__ if isinstance(error, SystemExit) else error
            if devices > 1:
                trainer = self.trainer["callbacks"][-1].trainer
                with pytest.raises(PipelineError, match=r"No checkpoint .* last checkpoint\.$"):
                    trainer.save_checkpoint("afterwards.ckpt")
            return type(ended).__name__, said
        return "nothing", said


def interrupted(path, ranks=(), error=KeyError, model=Perceptron):
    savers = [
        cb.OnExceptionCheckpoint(path),
        cb.ModelCheckpoint(path, "kept", save_on_exception=True, save_last=True),
        Asks(),
        Fails(ranks, error),
    ]
    return Interrupted(model, lambda: vectors(53), trainer=dict(callbacks=savers, **SAVES))


SAVES = {"enable_checkpointing": True, "limit_val_batches": 0}


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_ranks_that_stop_together_save_on_an_exception(error, tmp_path):
    assert interrupted(tmp_path / "plain", (0,), error).plain() == (error.__name__, [])
    assert interrupted(tmp_path / "own", (0, 1), error).pipelined(2) == [(error.__name__, [])] * 2
    for name in ("on_exception", "kept"):
        own, plain = (
            torch.load(tmp_path / folder / f"{name}.ckpt", weights_only=False)
            for folder in ("own", "plain")
        )
        for part in ("state_dict", "optimizer_states", "global_step", "epoch"):
            assert_same(own[part], plain[part])


@pytest.mark.parametrize(
    ("ranks", "model"), [((0,), Perceptron), ((1,), Perceptron), ((), FailsInStep)], ids=str
)
def test_a_rank_that_stops_alone_keeps_its_error(ranks, model, tmp_path):
    """No checkpoint, no hang, and the error is not hidden."""
    ends = interrupted(tmp_path, ranks, KeyError, model).pipelined(2, deadline=25)
    told = [name for name, _ in ends]
    assert set(told) <= {"KeyError", "PipelineError"}
    assert [rank for rank, name in enumerate(told) if name == "KeyError"] == list(ranks) or (
        model is FailsInStep and "KeyError" in told  # the other may have lost it by then
    )
    assert not list(tmp_path.glob("*.ckpt"))
    for _, said in ends:
        assert any(re.search(r"No checkpoint .*on_exception.*rank .* has failed", t) for t in said)


class FailsInTurn(Script):
    """A run that all ranks end together, then one of a new Trainer that one rank ends."""

    def __call__(self, strategy, devices):
        failing.PATIENCE, ended = timedelta(seconds=1), []
        for ranks in ((0, 1), (0,)):
            self.trainer["callbacks"][-1].ranks = ranks
            try:
                super().__call__(strategy, devices)
            except BaseException as error:
                ended.append(type(error).__name__)
        return ended


@pytest.mark.parametrize("save_last", ["link", True])
def test_a_checkpoint_that_is_not_written_leaves_the_last_one(save_last, tmp_path):
    saver = cb.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, save_last=save_last, save_on_exception=True
    )
    saver.CHECKPOINT_NAME_LAST = "last-{step}" if save_last is True else "last"
    callbacks = [saver, Fails((0,), KeyError)]
    script = Interrupted(
        Perceptron, lambda: vectors(53), trainer=dict(callbacks=callbacks, **SAVES)
    )
    (name, said), _ = script.pipelined(2)
    assert name == "KeyError" and said
    files = sorted(path.name for path in tmp_path.iterdir())
    last = "last-step=1.ckpt" if save_last is True else "last.ckpt"
    assert files == sorted(["step=1.ckpt", last])
    for file in files:
        assert torch.load(tmp_path / file, weights_only=False)["global_step"] == 1


def test_what_ranks_agreed_on_in_one_run_is_nothing_to_the_next(tmp_path):
    callbacks = [cb.OnExceptionCheckpoint(tmp_path), Fails((0, 1), KeyError)]
    script = FailsInTurn(
        Perceptron, lambda: vectors(53), trainer=dict(callbacks=callbacks, **SAVES)
    )
    own, other = script.pipelined(2, deadline=30)
    assert own == ["KeyError", "KeyError"] and other[0] == "KeyError"
    assert other[1] in ("PipelineError", "RuntimeError")  # it lost its peer


def test_what_is_refused_is_told_in_the_users_own_lines(capfd):
    script = Script(ValueDependentForward, lambda: vectors(32), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed, match="Cannot cut inside"):
        script.pipelined(2)
    text = capfd.readouterr().err
    assert text.count("[rank 1] failed:") == text.count("Cannot cut inside") == 1
    files = re.findall(r'File "(.+)", line', text)
    assert files and all("/tests/" in file for file in files)


def test_errors_that_are_not_ours_keep_their_traceback():
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3)(torch.zeros(1, 5))
    before = traceback.format_exception(caught.value)
    reporting.shorten(caught.value)
    assert traceback.format_exception(caught.value) == before and "torch" in "".join(before)


def test_an_error_that_was_told_is_not_printed_again(monkeypatch):
    shown, told, other = [], KeyError("told"), KeyError("other")
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: shown.append(value))
    reporting.say_no_more_of(told)
    for error in (told, other):
        sys.excepthook(KeyError, error, None)
    assert shown == [other]
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *args: ours(*args))  # somebody else's
    reporting.say_no_more_of(told)
    reporting.say_no_more_of(told)
    for error in (told, other):
        sys.excepthook(KeyError, error, None)
    assert shown == [other, other]
