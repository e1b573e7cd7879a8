"""How samples are drawn: the same in the same steps as on one device, or as under DDP."""

from __future__ import annotations

import os

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from tests.distributed.feeds import Several, feeds
from tests.distributed.fits import Script, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import vectors
from tests.models.modules import Perceptron


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(rows(37, 6), rows(37, 3, seed=1), strict=True))


class Augmented(Dataset):
    """Draws from all three generators, in the workers."""

    def __init__(self):
        self.samples = vectors(40)[0]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x * torch.rand(()).item() + float(np.random.rand()), y


class Ragged(IterableDataset):
    """Whole batches of other sizes and lengths."""

    def __iter__(self):
        for count, length in ((9, 4), (16, 2), (5, 4), (9, 4), (1, 3), (16, 1)):
            yield rows(count, length, 6), rows(count, length, 3, seed=count)


class Sums(Perceptron):
    """Takes a collection of batches, of which some may have ended."""

    def error(self, batch):
        batches = batch.values() if isinstance(batch, dict) else batch
        errors = [F.mse_loss(self.net(b[0]), b[1]) for b in batches if b is not None]
        return sum((i + 1) * error for i, error in enumerate(errors)) / len(errors)

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.error(batch), batch_size=4)


class Concatenates(Sums):
    """Shows all batches to the network at once."""

    def error(self, batch):
        x, y = (torch.cat([one[i] for one in batch.values() if one is not None]) for i in (0, 1))
        return F.mse_loss(self.net(x), y)


class ManyLoaders(Perceptron):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]) * (1 + dataloader_idx))


def loader(count=40, **arguments):
    return DataLoader(vectors(count)[0], **{"batch_size": 8, **arguments})


def fed(training, validation=None):
    validation = loader(20) if validation is None else validation
    return {"train_dataloaders": training, "val_dataloaders": validation}


def two(mode):
    return CombinedLoader({"a": loader(40), "b": loader(24)}, mode)


def unequal(mode):
    return CombinedLoader({"a": loader(43), "b": loader(26, batch_size=12)}, mode)


def weighted():
    return WeightedRandomSampler(torch.arange(1.0, 41), 24)


LOADERS: dict[str, Script] = {
    "iterable": feeds(lambda: fed(DataLoader(Stream(), 8))),
    "shuffled": feeds(lambda: fed(loader(shuffle=True)), max_epochs=2),
    "dropped last": feeds(lambda: fed(loader(43, drop_last=True))),
    "weighted": feeds(lambda: fed(loader(sampler=weighted())), max_epochs=2),
    "batch sampler": feeds(
        lambda: fed(
            DataLoader(
                vectors(40)[0],
                batch_sampler=BatchSampler(RandomSampler(range(40)), 8, drop_last=False),
            )
        )
    ),
    "workers": feeds(lambda: fed(DataLoader(Augmented(), 16, num_workers=1)), max_epochs=1),
    "augmented": feeds(lambda: fed(DataLoader(Augmented(), 8, shuffle=True)), max_epochs=2),
    "ragged": feeds(lambda: fed(DataLoader(Ragged(), batch_size=None))),
    "min_size": feeds(lambda: fed(two("min_size")), Sums, limit_val_batches=0),
    "max_size": feeds(lambda: fed(two("max_size")), Sums, limit_val_batches=0),
    "max_size_cycle": feeds(lambda: fed(two("max_size_cycle"), two("max_size_cycle")), Sums),
    "dict": feeds(lambda: fed({"a": loader(40), "b": loader(24)}), Sums, limit_val_batches=0),
    "list": feeds(lambda: fed([loader(40), loader(24)]), Sums, limit_val_batches=0),
    "unequal": feeds(lambda: fed(unequal("max_size_cycle"), unequal("max_size")), Sums),
    "concatenated": feeds(lambda: fed(unequal("max_size"), unequal("min_size")), Concatenates),
    "validation, a sequence": feeds(lambda: fed(loader(), [loader(20), loader(9)]), ManyLoaders),
    "validation, sequential": feeds(lambda: fed(loader(), two("sequential")), ManyLoaders),
}


@pytest.mark.slow
def test_loaders_of_every_kind():
    Several(LOADERS).compare()


def own_sampler(**arguments):
    training = vectors(80)[0]
    return fed(DataLoader(training, 8, sampler=DistributedSampler(training, **arguments)))


REPLICATED: dict[str, Script] = {
    "shuffled": feeds(lambda: fed(loader(80, shuffle=True)), max_epochs=2),
    "own sampler": feeds(own_sampler, max_epochs=2),
    "iterable": feeds(lambda: fed(DataLoader(Stream(), 8))),
    "no sampler": feeds(lambda: fed(loader(shuffle=True)), use_distributed_sampler=False),
    "augmented": feeds(lambda: fed(DataLoader(Augmented(), 8))),
}


def test_replicas_draw_as_under_ddp():
    Several(REPLICATED).compare(ranks=2, replicas=2)


def test_own_distributed_sampler_deals_to_replicas():
    """Its default number of replicas is the number of ranks, of which all draw the same here."""
    Several({"own sampler": feeds(own_sampler)}).compare()


def test_sequential_training_is_lightnings_own_refusal():
    with pytest.raises(RankFailed, match="sequential"):
        feeds(lambda: fed(two("sequential")), limit_val_batches=0).pipelined(2, deadline=30)


class Unequal(Augmented):
    """Every process draws by itself, in its workers only."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.default_rng().random(), y


class Differs(IterableDataset):
    """Its third batch has other rows, or another length, on every rank."""

    def __init__(self, rows=0, length=0):
        self.more = rows, length

    def __iter__(self):
        for batch in range(4):
            more = int(os.environ["RANK"]) * (batch == 2)
            size, length = 8 + self.more[0] * more, 3 + self.more[1] * more
            yield rows(size, length, 6), rows(size, length, 3)


DRAWN_APART = {
    "workers": lambda: DataLoader(Unequal(), 8, num_workers=1),
    "other rows": lambda: DataLoader(Differs(rows=1), batch_size=None),
    "other lengths": lambda: DataLoader(Differs(length=1), batch_size=None),
}


@pytest.mark.parametrize("case", DRAWN_APART)
def test_ranks_that_draw_apart_are_told(case):
    """Before the step: with other shapes the stages would wait for each other for ever."""
    script = feeds(lambda: fed(DRAWN_APART[case]()), limit_val_batches=0)
    message = r"rank 1 and rank 0 of one pipeline got different batches.*workers=True.*augmentation"
    with pytest.raises(RankFailed, match=message):
        script.pipelined(2, deadline=30)


# ---- data modules


class Vectors(L.LightningDataModule):
    """Notes which of its hooks run, with the stage and the sum of the batch."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.noted = []

    def prepare_data(self):
        self.noted.append("prepare_data")

    def setup(self, stage):
        self.noted.append(f"setup {stage}")

    def loader(self, name, count=20, **arguments):
        self.noted.append(name)
        return loader(count, **arguments)

    def train_dataloader(self):
        return self.loader("train_dataloader", 36, shuffle=True)

    def val_dataloader(self):
        return [self.loader("val_dataloader"), self.loader("val_dataloader")]

    def test_dataloader(self):
        return [self.loader("test_dataloader"), self.loader("test_dataloader", 7)]

    def predict_dataloader(self):
        return [self.loader("predict_dataloader"), self.loader("predict_dataloader", 9)]

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.noted.append(f"on_before_batch_transfer {dataloader_idx} {batch[0].sum():.6g}")
        return [batch[0] + 1, batch[1]]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.noted.append(f"transfer_batch_to_device {dataloader_idx} {device}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.noted.append(f"on_after_batch_transfer {dataloader_idx}")
        return {"x": batch[0] * 2, "y": batch[1]}

    def teardown(self, stage):
        self.noted.append(f"teardown {stage}")


class Whole(Perceptron):
    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", F.mse_loss(self.net(batch["x"]), batch["y"]))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", F.mse_loss(self.net(batch["x"]), batch["y"]))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.net(batch["x"]) + dataloader_idx


def after(trainer, module):
    data = trainer.datamodule
    tested = trainer.test(module, data, verbose=False)
    predicted = trainer.predict(module, data)
    return data.noted, tested, predicted


def test_data_module_and_its_hooks():
    script = feeds(lambda: {"datamodule": Vectors()}, Whole)
    script.trainer |= {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    script.after = after
    expected, runs = Several({"": script}).compare()[""]
    noted, tested, predicted = expected.extra
    for rank, run in enumerate(runs):
        wanted = [note for note in noted if rank == 0 or note != "prepare_data"]
        assert run.extra[0] == wanted
        assert run.extra[1] == [pytest.approx(t, rel=1e-12) for t in tested]
        torch.testing.assert_close(run.extra[2], predicted, rtol=1e-12, atol=1e-14)
