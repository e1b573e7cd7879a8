"""Evaluations with other loaders on the ranks of one pipeline, and epochs that end early."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pipeline import PipelineStrategy, failing
from tests.distributed.fits import Script, distance, rows
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron

MOST = 5
ROWS = 4


def own_rank() -> int:
    return int(os.environ["RANK"])


class Counts(Perceptron):
    """Counts its batches by their loader."""

    def __init__(self):
        super().__init__()
        self.counted = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.net(batch[0])

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.counted.append((dataloader_idx, batch_idx))

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.counted.append((dataloader_idx, batch_idx))

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.counted.append((dataloader_idx, batch_idx))


class Stream(IterableDataset):
    """Does not know its length."""

    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        return zip(*self.parts, strict=True)


def loader(kind: str, batches: int, seed: int) -> DataLoader:
    parts = [rows(ROWS * MOST, width, seed=seed + width)[: ROWS * batches] for width in (6, 3)]
    data = Stream(parts) if kind == "stream" else TensorDataset(*parts)
    return DataLoader(data, ROWS)


@dataclass
class Evaluation:
    """An evaluation with loaders of so many batches on each rank.

    Attributes:
        function: The Trainer's.
        lengths: Batches of each loader, by rank.
        kind: Whether loaders know their lengths.
        flags: Arguments of the Trainer.
    """

    function: str
    lengths: tuple[tuple[int, ...], ...]
    kind: str = "sized"
    flags: dict[str, Any] = field(default_factory=dict)

    def __call__(self, strategy: Any, devices: int) -> Any:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        strategy = PipelineStrategy(devices) if strategy == "pipeline" else strategy
        trainer = L.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, **quiet, **self.flags
        )
        lengths = self.lengths[own_rank()]
        loaders = [loader(self.kind, count, 10 * i) for i, count in enumerate(lengths)]
        module = Counts()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if self.function == "fit":
                trainer.fit(module, loader("sized", MOST, 100), loaders)
            else:
                getattr(trainer, self.function)(module, loaders)
        said = {str(each.message) for each in told if "shortest" in str(each.message)}
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return module.counted, values, said

    def equals_one_device(self) -> list[set[str]]:
        """Asserts that it is that of one device with the shortest loaders; the warnings by rank."""
        fewest = tuple(map(min, zip(*self.lengths, strict=True)))
        one = Evaluation(self.function, (fewest,), self.kind, self.flags)
        [(counted, values, _)] = run_ranks(1, one, "auto", 1, deadline=30)
        ranks = len(self.lengths)
        found = run_ranks(ranks, self, "pipeline", ranks, deadline=30)
        for own, numbers, _ in found:
            assert own == counted
            assert numbers == pytest.approx(values, rel=1e-12)
        return [said for *_, said in found]


FIT = {"max_epochs": 2}


@pytest.mark.parametrize("lengths", [((2,), (4,)), ((4,), (2,)), ((2, 4), (3, 1))], ids=str)
@pytest.mark.parametrize("kind", ["sized", "stream"])
@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
def test_an_evaluation_ends_with_the_shortest_loader_of_a_pipeline(function, kind, lengths):
    evaluation = Evaluation(function, lengths, kind, FIT if function == "fit" else {})
    fewest = list(map(min, *lengths))
    told = [len(said) for said in evaluation.equals_one_device()]
    assert told == [int(list(own) != fewest) for own in lengths]


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_batches_are_limited_and_checked_first(kind):
    flags = {"limit_val_batches": 3, "num_sanity_val_steps": 4, **FIT}
    Evaluation("fit", ((5, 2), (1, 4)), kind, flags).equals_one_device()


def test_streams_that_are_empty_on_one_rank():
    Evaluation("validate", ((0, 3), (2, 0)), "stream").equals_one_device()


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        (((2,), (0,)), "must have batches on all ranks .* rank 0: 2, rank 1: 0"),
        (((2, 2), (2,)), "same number of loaders for validation, but have rank 0: 2, rank 1: 1"),
    ],
    ids=["no batch", "fewer loaders"],
)
def test_ranks_without_a_loader_are_refused_on_all(lengths, told):
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, Evaluation("fit", lengths, flags=FIT), "pipeline", 2, deadline=30)
    said = re.split(r"\n(?=rank \d: )", str(failure.value))[1:]
    assert len(said) == 2 and all(re.search(told, each) for each in said), failure.value


class OneWithout(Evaluation):
    """``fit`` gets nothing to validate with on rank 1."""

    def __call__(self, strategy, devices):
        fit = L.Trainer.fit
        if own_rank():
            L.Trainer.fit = lambda trainer, module, loader, _: fit(trainer, module, loader)
        return super().__call__(strategy, devices)


def test_a_rank_that_would_not_validate_is_refused_on_all():
    with pytest.raises(RankFailed, match="for validation, but have rank 0: 1, rank 1: 0"):
        run_ranks(2, OneWithout("fit", ((2,), (2,)), flags=FIT), "pipeline", 2, deadline=30)


class Lies:
    """A batch sampler that does not keep what it promises."""

    def __init__(self, given: int, promised: int) -> None:
        self.given, self.promised = given, promised

    def __len__(self):
        return self.promised

    def __iter__(self):
        return (list(range(ROWS * i, ROWS * i + ROWS)) for i in range(self.given))


@dataclass
class Lied(Script):
    """A loader that promises six batches.

    Attributes:
        given: What it gives, by rank.
    """

    given: tuple[int, ...] = ()

    def loader(self, training):
        return DataLoader(training, batch_sampler=Lies(self.given[own_rank()], 6))


def lied(*given, model: Callable[[], L.LightningModule] = Perceptron, **flags):
    trainer = {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 0, **flags}
    return Lied(model, lambda: vectors(24), trainer=trainer, given=given)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(failing, "END_PATIENCE", timedelta(seconds=1))


def test_loaders_that_all_end_early_are_those_of_one_device():
    expected = lied(3).plain()
    for run in lied(3, 3).pipelined(2, deadline=30):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.parametrize("given", [(3, 6), (6, 3), (3, 4)], ids=str)
def test_a_loader_that_ends_early_alone_is_told_of(given, impatient):
    short = given.index(3)
    told = rf"Rank {short} ended an epoch of training behind batch 3 of the 6 that its loaders"
    with pytest.raises(RankFailed, match=told):
        lied(*given).pipelined(2, deadline=30)


@dataclass
class LiedInValidation(Lied):
    def loader(self, training):
        return DataLoader(training, ROWS)

    def validation_loader(self, validation):
        return DataLoader(vectors(24)[0], batch_sampler=Lies(self.given[own_rank()], 6))


def test_a_validation_that_ends_early(impatient):
    def make(*given):
        script = lied(*given, limit_val_batches=1.0, num_sanity_val_steps=0)
        return LiedInValidation(**vars(script))

    expected = make(3).plain()
    for run in make(3, 3).pipelined(2, deadline=30):
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
    told = "Rank 1 ended an epoch of validation behind batch 3 of the 6 that its loaders promise"
    with pytest.raises(RankFailed, match=told):
        make(6, 3).pipelined(2, deadline=30)


class RunsDry(Perceptron):
    """What it draws from ends before its loader, in a place of its choice.

    Args:
        place: Name of the method.
        ranks: Those where it ends.
    """

    def __init__(self, place: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.place, self.ranks, self.left = place, ranks, iter(range(4))

    def draw(self, place: str) -> None:
        if place == self.place and own_rank() in self.ranks:
            next(self.left)

    def training_step(self, batch, batch_idx):
        self.draw("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.draw("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *args):
        self.draw("on_train_batch_end")

    def on_train_epoch_end(self):
        self.draw("on_train_epoch_end")

    def on_validation_batch_end(self, *args):
        self.draw("on_validation_batch_end")


def dry(place, ranks=(0, 1), **flags):
    trainer = {"max_steps": -1, "max_epochs": 6, **flags}
    return Script(lambda: RunsDry(place, ranks), lambda: vectors(64), trainer=trainer)


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("training_step", "training_step raised StopIteration"),
        ("validation_step", "validation_step raised StopIteration"),
        ("on_validation_batch_end", "a hook of validation raised StopIteration"),
    ],
)
def test_a_step_that_raises_stop_iteration_is_an_error(place, told, ranks):
    with pytest.raises(RankFailed, match=told):
        dry(place, ranks).pipelined(2, deadline=20)


@pytest.mark.parametrize("place", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_hook_that_ends_the_epoch(place, impatient):
    expected = dry(place).plain()
    for run in dry(place).pipelined(2, deadline=30):
        assert distance(run, expected) <= TOLERANCE
    with pytest.raises(RankFailed, match=r"Rank 1 ended an epoch of training behind batch \d"):
        dry(place, (1,)).pipelined(2, deadline=30)


class FailsAlone(Perceptron):
    """Its training step fails on one rank."""

    def training_step(self, batch, batch_idx):
        if own_rank() == 1:
            raise ValueError("rank 1 has no target")
        return super().training_step(batch, batch_idx)


def test_a_training_step_that_fails_on_one_rank_behind_a_validation():
    with pytest.raises(RankFailed, match="rank 1 has no target"):
        Script(FailsAlone, lambda: vectors(64)).pipelined(2, deadline=20)
