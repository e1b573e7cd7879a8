"""Replicas with loaders of other lengths, and what one of them alone runs into."""

from __future__ import annotations

import os
import re

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pipeline import epochs
from tests.distributed.feeds import Several, feeds
from tests.distributed.fits import Script, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.distributed.test_precision import Overflows
from tests.distributed.test_settings import Poisoned

REPLICAS, SHORTEST, MOST = 2, 3, 5


def own_replica() -> int:
    """Neighbours are replicas, and under DDP every rank is one."""
    return int(os.environ["RANK"]) % REPLICAS


def batches(count, replica=0):
    """Batches of four rows, others on each replica; fewer are the first of more."""
    data = [rows(4 * MOST, width, seed=replica + 2 * width) for width in (6, 3)]
    return list(zip(*(part.split(4) for part in data), strict=True))[:count]


class Stream(IterableDataset):
    """Does not know its length."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        replica = own_replica()
        yield from batches(self.lengths[replica], replica)


class Boasts(Stream):
    """Tells a length that it does not keep."""

    def __len__(self):
        return MOST


class Sized(Dataset):
    def __init__(self, lengths):
        replica = own_replica()
        self.batches = batches(lengths[replica], replica)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class Counts(L.Callback):
    """Counts batches and validations."""

    def __init__(self):
        self.counted = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.counted.append(batch_idx)

    def on_validation_end(self, trainer, module):
        self.counted.append("validation")


def counted(trainer, module):
    [callback] = [c for c in trainer.callbacks if isinstance(c, Counts)]
    return callback.counted


def fit(kind, lengths, **trainer):
    def data():
        validation = DataLoader(vectors(8)[0], 4)
        loader = DataLoader(kind(lengths), None)
        return {"train_dataloaders": loader, "val_dataloaders": validation}

    flags = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    script = feeds(data, **{**flags, **trainer}, callbacks=[Counts()])
    script.after = counted
    return script


FLAGS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "validation in the epoch": {"val_check_interval": 2},
}


@pytest.mark.parametrize("lengths", [(SHORTEST, MOST), (MOST, SHORTEST)], ids=str)
@pytest.mark.parametrize("kind", [Stream, Boasts, Sized])
def test_an_epoch_ends_with_the_shortest_loader(kind, lengths):
    """As under DDP where all have as many batches as the shortest."""
    cases = {**FLAGS, "half": {"val_check_interval": 0.5}} if kind is Sized else FLAGS
    equal = {name: fit(kind, (SHORTEST, SHORTEST), **flags) for name, flags in cases.items()}
    other = {name: fit(kind, lengths, **flags) for name, flags in cases.items()}
    expected = Several(equal).plain(REPLICAS)
    for rank, run in enumerate(Several(other).pipelined(2, REPLICAS)):
        for name, wanted in expected[rank % REPLICAS].items():
            assert run[name].extra == wanted.extra, name
            assert distance(run[name], wanted) <= TOLERANCE, name


@pytest.mark.parametrize("kind", [Stream, Sized])
def test_ranks_that_have_more_are_told_once(kind, monkeypatch):
    told = []
    monkeypatch.setattr(epochs, "_tell", told.append)
    script = fit(kind, (SHORTEST, MOST))
    script.after = lambda trainer, module: list(told)
    runs = [run.extra for run in script.pipelined(2, REPLICAS)]
    assert [len(run) for run in runs] == [0, 1, 0, 1] and "shortest" in runs[1][0]


def test_a_replica_without_a_batch_ends_the_epoch():
    script = fit(Stream, (0, 2))
    assert [run.extra for run in script.pipelined(2, REPLICAS)] == [[]] * 4


class LongerOnRank(Stream):
    """Other lengths on the ranks of one pipeline, the same samples."""

    def __iter__(self):
        yield from batches(SHORTEST + int(os.environ["RANK"]))


def test_ranks_of_one_pipeline_end_together():
    script = fit(LongerOnRank, (), max_epochs=1, limit_val_batches=0)
    assert [run.extra for run in script.pipelined(2)] == [[*range(SHORTEST)]] * 2


class OverflowsAlone(Overflows):
    """Its loss is infinite on one replica."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx if own_replica() else 0)


def test_all_replicas_skip_the_step_of_one():
    def make():
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        return Script(
            OverflowsAlone,
            lambda: vectors(192),
            trainer={"limit_val_batches": 0, "plugins": [plugin]},
            after=lambda trainer, module: trainer.precision_plugin.scaler.get_scale(),
        )

    expected = make().plain(REPLICAS)
    assert expected.extra == 2.0**15
    for run in make().pipelined(2, REPLICAS):
        assert run.extra == expected.extra
        assert distance(run, expected) <= TOLERANCE


class PoisonedAlone(Poisoned):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx if own_replica() else 0)


def test_an_anomaly_of_one_replica_ends_all():
    trainer = {"detect_anomaly": True, "limit_val_batches": 0}
    script = Script(PoisonedAlone, lambda: vectors(96), trainer=trainer)
    with pytest.raises(RankFailed, match=r"Function '\w+Backward0' returned nan values"):
        script.pipelined(2, REPLICAS, deadline=30)


class Clips(OverflowsAlone):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


def test_a_norm_that_is_infinite_on_one_replica_is_refused_on_all_ranks():
    script = Script(Clips, lambda: vectors(192), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed) as failure:
        script.pipelined(2, REPLICAS, deadline=30)
    text = str(failure.value)
    told = r"The total norm of order 2.0 of the gradients of all stages is (nan|inf)"
    said = re.split(r"\n(?=rank \d: )", text)[1:]
    assert len(said) == 4 and all(re.search(told, each) for each in said), text
