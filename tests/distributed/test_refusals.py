"""What cannot run is refused on every rank, in the user's words, and never by a hang."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.refusals import warn_of_optimizers
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, images, vectors
from tests.models.modules import BatchNormCNN, Perceptron


class Manual(Perceptron):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Perceptron):
    def backward(self, loss):
        loss.backward()


class TwoOptimizers(Perceptron):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD([self.scale], 0.1)]


class UsesLBFGS(Perceptron):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class DependsOnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.second(x)


class ValueDependent(Perceptron):
    def __init__(self):
        super().__init__()
        self.net = DependsOnValues()


class ValueDependentForward(Perceptron):
    def forward(self, x):
        for layer in self.net:
            x = layer(x) if x.mean() > -1e9 else x
        return x

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])


class NoCall(Perceptron):
    def training_step(self, batch, batch_idx):
        return self.scale * batch[0].mean()


class ReturnsNothing(Perceptron):
    def training_step(self, batch, batch_idx):
        self.net(batch[0])


class Detached(Perceptron):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class NoTensors(Perceptron):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return "text"


class ChangesCalls(Perceptron):
    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        if batch_idx == 2:
            y = y + self.net(batch[0])
        return F.mse_loss(y, batch[1])


class ChangesSetting(Perceptron):
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = 1.0
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x):
            return self.layers(x) / self.temperature

    def __init__(self):
        super().__init__()
        self.net = self.Tempered()

    def training_step(self, batch, batch_idx):
        self.net.temperature = 1.0 + batch_idx
        return super().training_step(batch, batch_idx)


class WritesWeights(Perceptron):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class CountsInBuffer(Perceptron):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)


class RebindsBuffer(CountsInBuffer):
    def training_step(self, batch, batch_idx):
        loss = Perceptron.training_step(self, batch, batch_idx)
        self.count = self.count + 1
        return loss


class UsesForeignWeight(Perceptron):
    """A hook looks at a weight that one of the ranks does not hold."""

    def on_before_optimizer_step(self, optimizer):
        self.log("first", self.net[0].weight.abs().sum() + self.net[-1].weight.abs().sum())


class ReturnsFunction(Perceptron):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": lambda: 1}


REFUSED = {
    "returns a function": (
        ReturnsFunction,
        "must be known on every rank, but cannot be sent.*tens",
    ),
    "manual optimization": (Manual, "needs automatic optim.*return the loss.*GAN.*in turn"),
    "own backward": (OwnBackward, "OwnBackward.backward would never be called.*on_after_backward"),
    "two optimizers": (TwoOptimizers, "TwoOptimizers.conf.*several.*a group.*a Trainer of its own"),
    "LBFGS": (UsesLBFGS, "cannot run LBFGS.*AdamW"),
    "value dependent": (
        ValueDependent,
        r"inside 'net.*if x.sum\(\) > 0.*depends on.*its own.*configure_stages\(num",
    ),
    "value dependent own forward": (
        ValueDependentForward,
        r"if x.mean\(\) > -1e9.*depends on.*\(module='net'\).*partition=\[NAMES",
    ),
    "no call": (NoCall, "calls no module that holds parameters.*self.model"),
    "returns nothing": (ReturnsNothing, "must return a loss.*multiplied by 0"),
    "detached loss": (Detached, "does not depend on any parameter"),
    "no tensors": (NoTensors, "cannot be cut into microbatches.*on_after_batch_transfer"),
    "changing calls": (ChangesCalls, "calls self.net as number 2.*may not change"),
    "changing setting": (ChangesSetting, "self.net.temperature is 2.0, but was 1.0.*buffer"),
    "writes weights": (WritesWeights, "itself writes to 'net.0.weight'.*on_train_batch_end"),
    "counts in a buffer": (CountsInBuffer, "itself writes to 'count'.*on_train_batch_end"),
    "binds a buffer anew": (RebindsBuffer, "itself writes to 'count'.*on_train_batch_end"),
    "foreign weight": (UsesForeignWeight, "'net.*' *, *which is on stage"),
}
EVERYWHERE = {
    "returns a function",
    "value dependent own forward",
    "manual optimization", "own backward", "two optimizers", "LBFGS", "value dependent", "no call",
    "no tensors", "writes weights", "counts in a buffer", "binds a buffer anew", "foreign weight",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(case):
    model, message = REFUSED[case]
    script = Script(model, lambda: vectors(96), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed) as caught:
        script.pipelined(2, deadline=30)
    said = str(caught.value).split("\nrank 1: ")
    assert len(said) == 2, "a rank hung or died without a word"
    told = [bool(re.search(message, text, re.DOTALL)) for text in said]
    assert all(told) if case in EVERYWHERE else any(told), caught.value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "1f2b"}, "schedule must be one of GPipe.*Set schedule='1F1B'"),
        ({"pipeline_parallel_size": 3}, "must divide the number of processes, got 3 for 4"),
        ({"num_microbatches": 2}, "1F1B needs at least as many microbatches as stages.*=4"),
        ({"schedule": "DualPipeV", "num_microbatches": 4}, "num_microbatches=8"),
        ({"schedule": "GPipe", "stages_per_rank": 2}, "GPipe needs exactly 1 stage"),
        ({"schedule": "ZBVZeroBubble", "stages_per_rank": 3}, "exactly 2 stage"),
        ({"schedule": "Interleaved1F1B", "num_microbatches": 9}, "num_microbatches=8 or "),
    ],
)
def test_impossible_counts_are_refused_before_any_process_starts(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        L.Trainer(accelerator="cpu", devices=4, strategy=PipelineStrategy(**arguments))


class Lars(torch.optim.SGD):
    """Its step is its own, and takes the norm of one parameter at a time."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad *= parameter.norm() / (1 + parameter.grad.norm())
        super().step()
        return loss


class Renamed(torch.optim.AdamW):
    """Has torch's step."""


class UsesLars(Perceptron):
    def configure_optimizers(self):
        return Lars(self.parameters(), lr=0.05)


OWN_RANK_ONLY = (
    "Lars.step sees the parameters of its own rank only.*not if it takes a number.*AdamW"
)


@pytest.mark.parametrize(
    ("kind", "ranks", "told"), [(Lars, 2, True), (Lars, 1, False), (Renamed, 2, False)]
)
def test_optimizers_with_a_step_of_their_own_are_warned_of(kind, ranks, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_optimizers([kind([nn.Parameter(torch.ones(1))], lr=0.1)], ranks)
    assert [bool(re.search(OWN_RANK_ONLY, str(w.message))) for w in caught] == [True] * told


def test_optimizers_that_take_one_parameter_at_a_time_equal_one_device():
    script = Script(UsesLars, lambda: vectors(96), trainer={"limit_val_batches": 0})
    expected = script.plain()
    for run in script.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
    strict = replace(script, setup=lambda module: warnings.filterwarnings("error", ".*own rank"))
    with pytest.raises(RankFailed, match=OWN_RANK_ONLY):
        strict.pipelined(2, deadline=30)


def test_unknown_module_name():
    script = Script(Perceptron, lambda: vectors(32))
    with pytest.raises(RankFailed, match=r"dotted name.*'nett'.*Close ones are 'net'"):
        script.pipelined(2, module="nett", deadline=30)


def test_unknown_partition_name():
    script = Script(Perceptron, lambda: vectors(32))
    with pytest.raises(RankFailed, match=r"'net.99' does not run"):
        script.pipelined(2, partition=("net.99",), deadline=30)


def test_error_of_the_user_keeps_its_own_type_and_line():
    class Broken(Perceptron):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise KeyError("my own mistake")
            return loss

    script = Script(Broken, lambda: vectors(96), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed, match=r"KeyError: 'my own mistake'"):
        script.pipelined(2, deadline=30)


CALLBACKS = {
    "ModelPruning": (Perceptron, lambda: ModelPruning("l1_unstructured", amount=0.5), "one device"),
    "BatchSizeFinder": (Perceptron, BatchSizeFinder, "batch size of the DataLoader"),
    "StochasticWeightAveraging": (
        BatchNormCNN,
        lambda: StochasticWeightAveraging(0.01),
        "model with BatchNorm.*nn.GroupNorm",
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_is_refused_with_a_cure(name):
    model, callback, cure = CALLBACKS[name]
    data = images if model is BatchNormCNN else vectors
    refused = Script(model, lambda: data(32), trainer={"callbacks": [callback()]})
    text = rf"(?s)MisconfigurationException: strategy='pipeline' cannot run the callback {name}.*"
    with pytest.raises(RankFailed, match=text + cure) as caught:
        refused.pipelined(2, deadline=30)
    assert str(caught.value).count("cannot run the callback") >= 2, "a rank was not told"
