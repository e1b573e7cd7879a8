"""Whole backwards in two parts, hooks on what flows back, and values that are buffers."""

from __future__ import annotations

from functools import cache

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipeline import engine
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import vectors

MANNERS = {
    "whole": None,
    "products": {"products_alone": True},
    "everything": {"products_alone": False},
}


class Clamped(nn.Module):
    """Clamps the gradient that comes back to its layer; stays whole, for it reads a value."""

    def __init__(self, width) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        x.sum().item()
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return y.tanh()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 8), Clamped(8), nn.LayerNorm(8), Clamped(8), nn.Linear(8, 3)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Forced:
    """Makes every stage run its whole backwards in one manner, and counts those in two parts."""

    def __init__(self, manner) -> None:
        self.manner = manner

    def __call__(self, module) -> None:
        split, module.splits = engine._Pass._split, 0

        def counted(this, *args, **kwargs):
            module.splits += 1
            return split(this, *args, **kwargs)

        engine._Pass._split = counted
        engine._Pass._manner = lambda this, stage, edges: self.manner


@cache
def reference():
    return Script(Model, lambda: vectors(96)).plain()


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS"])
@pytest.mark.parametrize("manner", MANNERS)
def test_whole_backwards_in_parts_equal_one_device(manner, schedule):
    forced = Forced(MANNERS[manner])
    script = Script(
        Model, lambda: vectors(96), setup=forced, after=lambda trainer, module: module.splits
    )
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, reference()) <= 1e-12
        assert (run.extra > 0) == (manner != "whole")


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_hooks_on_what_flows_back_count_for_weights_too(schedule):
    script = Script(Model, lambda: vectors(96))
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, reference()) <= 1e-12


class Wide(L.LightningModule):
    """Large products, few rows: worth a backward in two parts without being told."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 600), nn.Linear(600, 600))
        self.head = nn.Linear(600, 3)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.head(self.net(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.head(self.net(batch[0])), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_splits(module):
    split, module.splits = engine._Pass._split, 0

    def counted(this, *args, **kwargs):
        module.splits += 1
        return split(this, *args, **kwargs)

    engine._Pass._split = counted


def test_large_products_are_run_in_two_parts_by_themselves():
    script = Script(
        Wide, lambda: vectors(96), setup=count_splits, after=lambda trainer, module: module.splits
    )
    plain = Script(Wide, lambda: vectors(96)).plain()
    for run in script.pipelined(2, schedule="1F1B", num_microbatches=4):
        assert distance(run, plain) <= 1e-12
        assert run.extra > 0


class Queue(nn.Module):
    """Returns its own buffer, which the next call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x.sum().item()
        h = self.layer(x)
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * h.detach().mean(0))
        return h, self.mean


class TwoCalls(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Queue()
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        h, mean = self.encoder(batch[0])
        return F.mse_loss(self.decoder(torch.tanh(h + mean)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS", "ZBVZeroBubble"])
def test_a_buffer_that_travels_is_that_of_its_microbatch(schedule):
    flags = {"limit_val_batches": 0}
    accumulating = {**flags, "accumulate_grad_batches": 4, "max_steps": 6}
    plain = Script(TwoCalls, lambda: vectors(96), 4, accumulating).plain()
    script = Script(TwoCalls, lambda: vectors(96), 16, flags)
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class SwitchesInMicrobatch(L.LightningModule):
    """Sets what a forward reads by what is in a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Scaled()

    def training_step(self, batch, batch_idx):
        self.net.scale = 2.0 if bool((batch[1][:, 0] == 100.0).any()) else 1.0
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gate(nn.Module):
    """Lets no gradient through while it is closed; stays whole, for it has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.closed = nn.Linear(6, 8), True
        self.register_forward_hook(lambda *_: None)

    def forward(self, x):
        y = self.layer(x)
        return y.detach() if self.closed else y


class Opens(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Gate(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].closed = batch_idx == 0

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
def test_a_gradient_that_was_not_planned_is_refused(schedule, stages):
    script = Script(Opens, lambda: vectors(96), 16, {"limit_val_batches": 0})
    with pytest.raises(RankFailed, match="gives a tensor that needs a gradient; when it was"):
        cuts = [f"net.{index}" for index in range(1, stages)]
        script.pipelined(2, schedule=schedule, num_microbatches=4, partition=cuts)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x):
        return self.second(self.first(x) * self.scale)


def marked_vectors():
    training, validation = vectors(96)
    training.tensors[1][9, 0] = 100.0  # in the third microbatch of the first batch
    return training, validation


def test_a_value_that_only_one_microbatch_sets_is_refused():
    script = Script(SwitchesInMicrobatch, marked_vectors, 16, {"limit_val_batches": 0})
    with pytest.raises(RankFailed, match=r"self\.net\.scale is 2\.0, but was 1\.0"):
        script.pipelined(2, schedule="LoopedBFS", num_microbatches=4)
