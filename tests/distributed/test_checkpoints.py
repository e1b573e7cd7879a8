"""Checkpoints are plain Lightning checkpoints, and the module is whole again after the fit."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import TOLERANCE, tokens, vectors
from tests.models.modules import LanguageModel, Perceptron


class ByHand(LanguageModel):
    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth=depth)
        self.save_hyperparameters()


def save(path):
    def after(trainer, module):
        assert not any(p.is_meta for p in module.parameters())
        return module(torch.zeros(1, 4, dtype=torch.long)).detach()

    return Script(
        ByHand,
        lambda: tokens(32),
        trainer={"callbacks": [Checkpoint(path)], "limit_val_batches": 1},
        after=after,
    )


class Checkpoint(L.Callback):
    """Saves at the end of the second of three epochs."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def load(path):
    torch.set_default_dtype(torch.float64)
    module = ByHand.load_from_checkpoint(path)
    return module.state_dict(), torch.load(path, weights_only=False)


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas"), [("1F1B", 2, 1), ("ZBVZeroBubble", 2, 2), ("GPipe", 4, 1)]
)
def test_checkpoint_equals_that_of_one_device(tmp_path, schedule, ranks, replicas):
    plain, pipelined = tmp_path / "plain.ckpt", tmp_path / "pipelined.ckpt"
    script = save(plain)
    if replicas == 1:
        expected = script.plain()
        runs = save(pipelined).pipelined(ranks, schedule=schedule)
        assert torch.equal(runs[0].extra, runs[1].extra)
        torch.testing.assert_close(runs[0].extra, expected.extra, rtol=1e-12, atol=1e-12)
    else:
        script.plain(replicas)
        save(pipelined).pipelined(ranks, replicas, schedule=schedule)
    [(state, checkpoint)] = run_ranks(1, load, pipelined)
    [(expected_state, expected_checkpoint)] = run_ranks(1, load, plain)
    assert list(state) == list(expected_state)
    assert checkpoint.keys() == expected_checkpoint.keys()
    for name, tensor in expected_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-13)
    [own], [other] = checkpoint["optimizer_states"], expected_checkpoint["optimizer_states"]
    assert own["param_groups"] == other["param_groups"]
    assert list(own["state"]) == list(other["state"])
    for index, entry in other["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(own["state"][index][key], value, rtol=1e-11, atol=1e-13)


def resume(path):
    return Script(Resumed(path), lambda: vectors(32), trainer={"limit_val_batches": 0})


class Resumed:
    """Makes the module and lets its fit begin at a checkpoint."""

    def __init__(self, path):
        self.path = path

    def __call__(self):
        module = Perceptron()
        fit = L.Trainer.fit
        L.Trainer.fit = lambda trainer, *args: fit(trainer, *args, ckpt_path=self.path)
        return module


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("resumed", [1, 2, 4])
def test_any_layout_resumes_from_any_other(tmp_path, saved, resumed):
    def interrupted(path):
        trainer = {"limit_val_batches": 0, "callbacks": [Checkpoint(path)]}
        return Script(Perceptron, lambda: vectors(32), trainer=trainer)

    plain, path = tmp_path / "plain.ckpt", tmp_path / "other.ckpt"
    interrupted(plain).plain()
    expected = resume(plain).plain()
    if saved == 1:
        path = plain
    else:
        interrupted(path).pipelined(saved)
    for run in [resume(path).plain()] if resumed == 1 else resume(path).pipelined(resumed):
        assert distance(run, expected) <= TOLERANCE


def test_second_fit_and_evaluation_after_fit():
    def after(trainer, module):
        training, validation = (DataLoader(data, 16) for data in vectors(96))
        validated = trainer.validate(module, validation, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 9
        trainer.fit(module, training)
        return validated

    script = Script(Perceptron, lambda: vectors(96), after=after)
    expected = script.plain()
    for run in script.pipelined(2, schedule="Interleaved1F1B"):
        assert distance(run, expected) <= TOLERANCE
        assert run.extra[0] == pytest.approx(expected.extra[0], rel=1e-12)
