"""Norms with running statistics: over replicas, of microbatches and of whole batches."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
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


# ---- running statistics of whole batches


class FirstNorms(Perceptron):
    """Norms whose input does not depend on another norm, of every kind."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.batch = nn.BatchNorm1d(6, momentum=momentum)
        self.instance = nn.InstanceNorm1d(2, momentum=momentum or 0.3, track_running_stats=True)
        self.twice = nn.BatchNorm1d(6, affine=False)
        self.stateless = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        x = self.batch(x) + self.instance(x.view(-1, 2, 3)).view(-1, 6)
        return self.net(self.stateless(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y) + self.twice(x).sum() * 0 + self.twice(2 * x + 1).sum() * 0
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        # Weights would differ from those of one device; the statistics must not.
        return torch.optim.SGD(self.parameters(), lr=0.0)


def deferred(model, rows=64, **trainer):
    trainer = {"max_epochs": 2, "max_steps": -1, "limit_val_batches": 2, **trainer}
    return Script(model, lambda: vectors(rows), trainer=trainer)


@functools.cache
def whole_batches(rows=64, momentum=0.1, **trainer):
    return deferred(partial(FirstNorms, momentum), rows, **trainer).plain()


@pytest.mark.parametrize(
    ("rows", "momentum", "strategy"),
    [
        (64, 0.1, {}),
        (64, None, {"schedule": "InterleavedZeroBubble"}),
        (64, 0.1, {"schedule": "ZBVZeroBubble", "activation_checkpointing": "full"}),
        (64, 0.1, {"activation_checkpointing": [nn.BatchNorm1d, nn.InstanceNorm1d]}),
        # batches of 16, 16 and 3 rows: fewer microbatches, of unequal sizes, and fillers
        (35, 0.1, {"schedule": "DualPipeV"}),
        (35, None, {"schedule": "1F1B", "num_microbatches": 5}),
    ],
)
def test_deferred_statistics_are_those_of_whole_batches(rows, momentum, strategy):
    expected = whole_batches(rows, momentum)
    strategy = {"num_microbatches": 4, "deferred_batch_norm": True, **strategy}
    for run in deferred(partial(FirstNorms, momentum), rows).pipelined(2, **strategy):
        assert distance(run, expected) <= TOLERANCE
        # with a norm that has no statistics, and is evaluated by those of whole batches
        assert run.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=1e-12)


def test_deferred_statistics_leave_training_alone():
    """Each microbatch is normalised as without, so the weights are the same to the last bit."""
    script, strategy = deferred(Normed), {"num_microbatches": 4}
    plain = script.pipelined(2, **strategy)[0]
    for run in script.pipelined(2, deferred_batch_norm=True, **strategy):
        for name, weight in plain.state.items():
            same = torch.equal(run.state[name], weight)
            assert same == ("running" not in name and "num_" not in name), name


def test_deferred_statistics_of_each_accumulated_batch():
    expected = whole_batches(accumulate_grad_batches=2)
    script = deferred(FirstNorms, accumulate_grad_batches=2)
    for run in script.pipelined(2, num_microbatches=4, deferred_batch_norm=True):
        assert distance(run, expected) <= TOLERANCE


class Synced(FirstNorms):
    """Without the norm that Lightning does not synchronise."""

    def __init__(self):
        super().__init__()
        self.instance = nn.Identity()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_deferred_statistics_over_synchronised_replicas(schedule):
    made = script(Synced, vectors, 2)
    expected = on_one_device(Synced, vectors)
    strategy = {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": 4}
    for run in run_ranks(4, made, {**strategy, "deferred_batch_norm": True}, 4):
        assert distance(run, expected) <= TOLERANCE


def test_deferred_statistics_of_replicas_are_those_of_the_first():
    expected = deferred(FirstNorms).plain(replicas=2)
    runs = deferred(FirstNorms).pipelined(2, 2, num_microbatches=4, deferred_batch_norm=True)
    for run in runs:
        assert distance(run, expected) <= TOLERANCE


def test_statistics_of_replicas_equal_ddp():
    """With the same microbatches, one after the other; the first replica's are everybody's."""
    made = {"accumulate_grad_batches": 4, "limit_val_batches": 0}
    expected = replace(deferred(Normed, **made), batch_size=4).plain(replicas=2)
    for run in deferred(Normed, limit_val_batches=0).pipelined(2, 2, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE


class Watching(Callback):
    """Copies the norms in the middle of a fit."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *args):
        norm = module.net[1]
        if type(norm.weight) is nn.Parameter:
            copies = [copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))]
            assert all(type(made) is nn.BatchNorm1d for made in copies)
            assert all(torch.equal(made.weight, norm.weight) for made in copies)
        self.seen.append((type(norm).__name__, type(norm).__module__, repr(norm)))


def seen(trainer, module):
    return trainer.callbacks[-1].seen[-1], type(module.net[1])


def test_norms_keep_their_name_and_can_be_copied():
    made = replace(deferred(Normed, max_epochs=1), after=seen)
    made.trainer["callbacks"] = [Watching()]
    own = nn.BatchNorm1d(8)
    for run in made.pipelined(2, num_microbatches=4, deferred_batch_norm=True):
        assert run.extra == (("BatchNorm1d", nn.BatchNorm1d.__module__, repr(own)), type(own))
