"""Calls that the loss depends on in some batches only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron

THRESHOLD = 1.0  # exceeded in some microbatches, not in the first
BEFORE, NOW = "planned with did not", "in a batch before it did"


class WarmsUp(Perceptron):
    """Has a second network, of which the loss knows later."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.other = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        other = self.other(batch[0])
        return self.total(super().training_step(batch, batch_idx), F.mse_loss(other, batch[1]))

    def total(self, loss, more):
        return loss + more if self.current_epoch else loss


class Fades(WarmsUp):
    def total(self, loss, more):
        return loss if self.current_epoch else loss + more


class Weighted(WarmsUp):
    """As it can be."""

    def total(self, loss, more):
        return loss + more * (self.current_epoch > 0)


class OfSomeRows(WarmsUp):
    """The first microbatch has no row for it."""

    def training_step(self, batch, batch_idx):
        loss, found = Perceptron.training_step(self, batch, batch_idx), batch[0][:, 0] > THRESHOLD
        other = self.other(batch[0])
        return loss + other[found].square().sum() if found.any() else loss


class Joins(WarmsUp):
    """A call whose argument is detached in the first epoch."""

    def training_step(self, batch, batch_idx):
        hidden = self.other(batch[0]).repeat(1, 2)
        hidden = hidden if self.current_epoch else hidden.detach()
        return F.mse_loss(self.net(hidden), batch[1])


class Parts(Joins):
    """Or in all but the first."""

    def training_step(self, batch, batch_idx):
        hidden = self.other(batch[0]).repeat(1, 2)
        hidden = hidden.detach() if self.current_epoch else hidden
        return F.mse_loss(self.net(hidden), batch[1])


class NeverUsed(WarmsUp):
    """Weights without a gradient stay as they are, weight decay or not."""

    def total(self, loss, more):
        self.log("more", more)
        return loss


def script(model: type[WarmsUp]) -> Script:
    return Script(model, lambda: vectors(48), trainer={"limit_val_batches": 0})


REFUSED = {
    WarmsUp: (BEFORE, "self.other"),
    OfSomeRows: (BEFORE, "self.other"),
    Joins: (BEFORE, "self.other"),
    Fades: (NOW, "self.other"),
    Parts: ("need a gradient where they did not", "self.net"),
}


@pytest.mark.parametrize("partition", ["auto", "uniform"])
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("model", REFUSED)
def test_refused(model: type[WarmsUp], schedule: str, partition: str) -> None:
    when, label = REFUSED[model]
    with pytest.raises(RankFailed, match=rf"{label} .*{when}.*Multiply the term"):
        script(model).pipelined(2, schedule=schedule, partition=partition)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("model", [Weighted, NeverUsed])
def test_equals_one_device(model: type[WarmsUp], schedule: str) -> None:
    expected = script(model).plain()
    for run in script(model).pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
