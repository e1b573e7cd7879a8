"""Weight averaging callbacks equal those of one device, and no rank keeps a whole copy."""

from __future__ import annotations

import functools
import os

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_pipeline.splitting import is_elsewhere
from tests.distributed.fits import Script, distance
from tests.distributed.test_exactness import TOLERANCE, tokens, vectors
from tests.models.modules import LanguageModel, Perceptron, WeightedLoss


class AfterEpochs(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= 1


class Small(LanguageModel):
    """Tied weights that two stages hold."""

    def __init__(self):
        super().__init__(depth=2)


class Saves(L.Callback):
    """Keeps the checkpoint of one epoch, and what this rank holds of the average."""

    def __init__(self, path):
        self.path, self.held, self.whole = path, 0, 0

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            tensors = list(trainer.callbacks[0]._average_model.state_dict().values())
            self.held = sum(t.numel() for t in tensors if not is_elsewhere(t))
            self.whole = sum(t.numel() for t in tensors)
            trainer.save_checkpoint(self.path)


MODELS = {
    "tied": (Small, lambda: tokens(48)),
    "buffers": (WeightedLoss, lambda: vectors(48)),
    "plain": (Perceptron, lambda: vectors(48)),
}
AVERAGES = {
    "EMA": ("tied", lambda: EMAWeightAveraging(decay=0.7)),
    "EMA of few steps": (
        "buffers",
        lambda: EMAWeightAveraging(
            decay=0.7, use_buffers=False, update_every_n_steps=2, update_starting_at_step=2
        ),
    ),
    "epochs": ("tied", AfterEpochs),
    "several at once": (
        "buffers",
        lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7), device="cpu"),
    ),
    "SWA": (
        "plain",
        lambda: StochasticWeightAveraging(0.03, swa_epoch_start=1, annealing_epochs=2),
    ),
    "late SWA": (
        "tied",
        lambda: StochasticWeightAveraging(0.003, 0.5, annealing_strategy="linear"),
    ),
}


class Averaged(Script):
    """A fit with an averaging callback that leaves a checkpoint, or begins at one."""

    start = None

    def __call__(self, strategy, devices):
        fit = L.Trainer.fit
        L.Trainer.fit = lambda trainer, *args: fit(trainer, *args, ckpt_path=self.start)
        return super().__call__(strategy, devices)


def script(case, path, start=None):
    model, callback = AVERAGES[case]
    made = Averaged(
        *MODELS[model],
        trainer={
            "callbacks": [callback(), Saves(path)],
            "max_steps": -1,
            "max_epochs": 4,
            "limit_val_batches": 2,
        },
        after=lambda trainer, _: (
            trainer.callbacks[0].state_dict(),
            dict(trainer.callbacks[0]._average_model.state_dict()),
            (trainer.callbacks[1].held, trainer.callbacks[1].whole),
        ),
    )
    made.start = start
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")

    @functools.cache
    def run(case):
        path = folder / f"{case}.ckpt"
        return script(case, path).plain(), path

    return run


def assert_same(value, wanted, path=""):
    """Equal structure and text; numbers as close as the order of sums lets them be."""
    if isinstance(wanted, Tensor):
        assert value.dtype == wanted.dtype, path
        torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-13, msg=path)
    elif isinstance(wanted, dict):
        assert list(value) == list(wanted), path
        for key, item in wanted.items():
            assert_same(value[key], item, f"{path}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(value) == len(wanted), path
        for index, item in enumerate(wanted):
            assert_same(value[index], item, f"{path}.{index}")
    else:
        assert value == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), path


@pytest.mark.parametrize("case", AVERAGES)
def test_average_equals_one_device(case, reference, tmp_path):
    expected, checkpoint = reference(case)
    schedule = ("1F1B", "ZBVZeroBubble", "Interleaved1F1B")[list(AVERAGES).index(case) % 3]
    runs = script(case, tmp_path / "own.ckpt").pipelined(2, schedule=schedule)
    for run in runs:
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
        assert_same(run.extra[:2], expected.extra[:2])
        held, whole = run.extra[2]
        assert 0 < held < 0.9 * whole
    own, wanted = (torch.load(p, weights_only=False) for p in (tmp_path / "own.ckpt", checkpoint))
    assert_same(own, wanted)


@pytest.mark.parametrize("case", ["EMA", "SWA"])
def test_average_goes_on_from_a_checkpoint(case, reference, tmp_path):
    _, checkpoint = reference(case)
    expected = script(case, tmp_path / "other.ckpt", checkpoint).plain()
    for run in script(case, tmp_path / "other.ckpt", checkpoint).pipelined(2):
        assert distance(run, expected) <= TOLERANCE
        assert_same(run.extra[:2], expected.extra[:2])


def test_average_over_replicas(tmp_path):
    expected = script("EMA", tmp_path / "plain.ckpt").plain(2)
    for run in script("EMA", tmp_path / "own.ckpt").pipelined(2, 2):
        assert distance(run, expected) <= TOLERANCE
    own, wanted = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("own", "plain"))
    assert_same(own, wanted)


def test_all_ranks_average_the_weights_of_the_first():
    """Without a seed every process makes other weights; validation sees the average of rank 0."""

    def unseeded(module):
        torch.manual_seed(int(os.environ["RANK"]))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

    made = Script(
        Perceptron,
        lambda: vectors(48),
        trainer={"callbacks": [EMAWeightAveraging(update_starting_at_step=100)]},
        setup=unseeded,
    )
    expected = made.plain()
    for run in made.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_the_learning_rate_finder_goes_back_to_the_average(tmp_path):
    """It loads its checkpoint into the placed module."""

    class Finds(Perceptron):
        lr = 0.05

    finder = LearningRateFinder(num_training_steps=8, update_attr=False)
    made = Script(
        Finds,
        lambda: vectors(96),
        trainer={
            "callbacks": [EMAWeightAveraging(decay=0.7), finder],
            "default_root_dir": tmp_path,
        },
    )
    expected = made.plain()
    for run in made.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-10)


def test_a_second_fit_averages_again():
    """Validation behind a fit swaps once more, with the copy that is whole again."""

    def after(trainer, module):
        training, validation = (DataLoader(data, 16) for data in vectors(48))
        validated = trainer.validate(module, validation, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 9
        trainer.fit(module, training, validation)
        return validated + trainer.validate(module, validation, verbose=False)

    callbacks = [EMAWeightAveraging(decay=0.7)]
    made = Script(Perceptron, lambda: vectors(48), trainer={"callbacks": callbacks}, after=after)
    expected = made.plain()
    for run in made.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
        assert_same(run.extra, expected.extra)
