"""Trainer(sync_batchnorm=True): the statistics of all replicas, as on one device."""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.distributed.feeds import feeds
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, images, vectors
from tests.models.modules import BatchNormCNN, Perceptron


class Normed(Perceptron):
    """BatchNorms of every kind: with momentum, as a mean over all batches, without weights."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(6, 8), norm(8), nn.Tanh()),
            *(nn.Linear(8, 8), norm(8, momentum=None), nn.Tanh()),
            *(nn.Linear(8, 8), norm(8, affine=False), nn.Tanh(), nn.Linear(8, 3)),
        )


class CNN(BatchNormCNN):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loaders(dataset, total, replicas):
    """Batches whose parts on the replicas make up the batches of one device."""
    training, validation = dataset(128)
    rank = torch.distributed.get_rank() % replicas
    order = DistributedSampler(training, replicas, rank, shuffle=False)
    return {
        "train_dataloaders": DataLoader(training, total // replicas, sampler=order),
        "val_dataloaders": DataLoader(validation, 10),
    }


def kinds(trainer, module):
    return [type(child) for child in module.modules()]


def script(model, dataset, replicas, **trainer):
    data = partial(loaders, dataset, 32, replicas)
    trainer = {"max_epochs": 1, "use_distributed_sampler": False, **trainer}
    made = feeds(data, model, sync_batchnorm=replicas > 1, **trainer)
    made.after = kinds
    return made


@functools.cache
def on_one_device(model, dataset, accumulated=1):
    made = script(model, dataset, 1, accumulate_grad_batches=accumulated)
    made.data = partial(loaders, dataset, 32 // accumulated, 1)
    return made.plain()


@pytest.mark.parametrize(
    ("model", "dataset", "schedule"),
    [(Normed, vectors, "GPipe"), (CNN, images, "GPipe"), (Normed, vectors, "LoopedBFS")],
)
def test_one_microbatch_equals_one_device(model, dataset, schedule):
    """With the running statistics, which the validation shows too."""
    expected = on_one_device(model, dataset)
    strategy = {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": 1}
    for run in run_ranks(4, script(model, dataset, 2), strategy, 4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=1e-12)
        assert run.extra == expected.extra


@pytest.mark.parametrize(
    "schedule", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_microbatches_equal_accumulated_batches(schedule):
    """Every schedule normalises the same microbatches: those of all replicas together."""
    expected = on_one_device(Normed, vectors, accumulated=4)
    strategy = {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": 4}
    for run in run_ranks(4, script(Normed, vectors, 2), strategy, 4):
        assert distance(run, expected) <= TOLERANCE


def test_own_sync_batchnorm_meets_replicas_only():
    """Left as it is, it would wait for ranks that hold other layers."""
    expected = on_one_device(Normed, vectors)
    strategy = {"pipeline_parallel_size": 2, "schedule": "GPipe", "num_microbatches": 1}
    made = script(partial(Normed, nn.SyncBatchNorm), vectors, 2)
    made.trainer["sync_batchnorm"] = False
    for run in run_ranks(4, made, strategy, 4):
        assert distance(run, expected) <= TOLERANCE


class OwnSync(LayerSync):
    def apply(self, model):
        return model

    revert = apply


def test_own_plugin_is_refused():
    plain = Script(Perceptron, lambda: vectors(32), trainer={"plugins": [OwnSync()]})
    message = r"cannot run the plugin OwnSync.*Trainer\(sync_batchnorm=True\)"
    with pytest.raises(RankFailed, match=message):
        plain.pipelined(2, deadline=30)
