"""A sanity check whose batches are of another kind than those of the training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import TensorDataset

from tests.distributed.fits import Script, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE
from tests.models.modules import Perceptron


def data() -> tuple[TensorDataset, TensorDataset]:
    inputs, targets, noise = (rows(48, size, seed=size) for size in (6, 3, 4))
    return TensorDataset(inputs, noise, targets), TensorDataset(inputs[:20])


class Denoises(Perceptron):
    """Trains with noise and a decoder; validates the encoder alone, which could be cut anew."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 9), nn.Linear(9, 3))
        self.scale = nn.Parameter(torch.ones(4))

    def training_step(self, batch, batch_idx):
        inputs, noise, targets = batch
        loss = F.mse_loss(self.decoder(self.net(inputs) * self.scale + noise), targets)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("size", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class BuiltLate(Denoises):
    def __init__(self) -> None:
        super().__init__()
        del self.net, self.decoder

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 3))


def script(model: type[Denoises], **trainer) -> Script:
    return Script(model, data, trainer={"max_epochs": 2, "max_steps": -1, **trainer})


class Normalised(Denoises):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(4)


AVERAGE = {"callbacks": [EMAWeightAveraging(decay=0.7)]}
CASES = {
    "GPipe": (Denoises, {}, {"schedule": "GPipe"}, 1),
    "ZBVZeroBubble": (Denoises, {}, {"schedule": "ZBVZeroBubble"}, 1),
    "average": (Denoises, AVERAGE, {}, 1),
    "replicas": (Denoises, {}, {}, 2),
    "norm": (
        Normalised,
        {},
        {"schedule": "GPipe", "num_microbatches": 1, "deferred_batch_norm": True},
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str) -> None:
    model, trainer, strategy, replicas = CASES[case]
    expected = script(model, **trainer).plain(replicas)
    runs = script(model, **trainer).pipelined(2, replicas, **strategy)
    for run in runs[::replicas]:  # those of the first replica: logs are not synchronised
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_refused_without_weights() -> None:
    with pytest.raises(RankFailed, match="num_sanity_val_steps=0"):
        script(BuiltLate).pipelined(2)
