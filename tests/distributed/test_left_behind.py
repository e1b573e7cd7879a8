"""Tensors that reach a module by another way than its arguments and parameters."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


class Modulated(nn.Module):
    """Is given its condition as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.condition = nn.Linear(6, 6), nn.Linear(6, 6), None

    def forward(self, x):
        return x + self.second(self.first(x).tanh() * self.condition)


class SetsAttribute(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.front = Modulated()

    def training_step(self, batch, batch_idx):
        self.front.condition = batch[0][:, :1] * 2
        return F.mse_loss(self.net(self.front(batch[0])), batch[1])


class Cell(nn.Module):
    """Remembers what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), None

    def forward(self, x):
        self.state = self.linear(x if self.state is None else x + self.state)
        return self.state


class Remembers(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def training_step(self, batch, batch_idx):
        self.cell.state = None
        self.cell(batch[0])
        return F.mse_loss(self.net(self.cell(batch[0])), batch[1])


class TiedData(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net[4].weight.data = self.net[2].weight.data


class NoNumber(Perceptron):
    """Has an attribute that is equal to nothing, itself included."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].best = float("nan")
        self.net[0].register_forward_pre_hook(lambda module, args: setattr(module, "rows", 1.0))


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class HasOwnNorm(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(OwnNorm(3))


class Penalised(nn.Module):
    """Leaves a part of the loss behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.penalty = nn.Linear(6, 6), torch.zeros(())

    def forward(self, x):
        y = self.linear(x).tanh()
        self.penalty = y.square().mean()
        return y


class ReadsPenalty(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(Penalised(), Penalised())

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(self.front(batch[0])), batch[1])
        return loss + sum(part.penalty for part in self.front)


class LogsInside(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net[3].register_forward_hook(lambda module, args, out: self.log("mean", out.mean()))


class Gathers(Perceptron):
    """Penalises features, which hooks gather in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = []
        for layer in (self.net[1], self.net[3]):
            layer.register_forward_hook(lambda module, args, out: self.gather(out))

    def gather(self, out):
        self.gathered.append(out.square().mean())

    def training_step(self, batch, batch_idx):
        self.gathered.clear()
        return super().training_step(batch, batch_idx) + sum(self.gathered)


class Keeps(SimpleNamespace):
    total = 0.0


class GathersElsewhere(Gathers):
    """Adds them up in an object, from which the step takes their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Keeps()

    def gather(self, out):
        self.kept.total = self.kept.total + out.square().mean()

    def training_step(self, batch, batch_idx):
        self.kept.total = 0.0
        return Perceptron.training_step(self, batch, batch_idx) + self.kept.total


FEATURES = []


class Perceives(Gathers):
    """Features of a frozen network: no parameter is between them and the arguments of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.net.requires_grad_(False)

    def gather(self, out):
        FEATURES.append(out)

    def training_step(self, batch, batch_idx):
        FEATURES.clear()
        y = self.net(self.front(batch[0]))
        return F.mse_loss(y, batch[1]) + sum(feature.square().mean() for feature in FEATURES)


class SetByHook(Perceptron):
    """A hook sets an attribute, which the step logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(lambda module, args, out: setattr(self, "seen", out))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("spread", self.seen.detach().std())
        return loss


class GathersInValidation(Gathers):
    """The training step does without."""

    def training_step(self, batch, batch_idx):
        return Perceptron.training_step(self, batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("loss", Gathers.training_step(self, batch, batch_idx))


class Switches(nn.Module):
    """Keeps a part in evaluation mode by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(6, 6)

    def forward(self, x):
        self.drop.eval()
        return self.linear(self.drop(x))


class SwitchesInside(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, Switches())


class SwitchesInStep(Perceptron):
    """Stages that are strictly inside the call do as the step says as well."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(part for layer in self.net for part in (layer, nn.Dropout(0.5))))

    def training_step(self, batch, batch_idx):
        self.net.eval()
        loss = super().training_step(batch, batch_idx)
        self.net.train()
        return loss


class AutocastsLater(Perceptron):
    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", torch.bfloat16, enabled=batch_idx > 0):
            out = self.net(batch[0])
        return F.mse_loss(out.double() * self.scale, batch[1])


class FreezesLater(Perceptron):
    """The middle stage does not run the step."""

    def training_step(self, batch, batch_idx):
        self.net[2].requires_grad_(batch_idx < 1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("schedule", ["GPipe", "InterleavedZeroBubble"])
@pytest.mark.parametrize("model", [SetsAttribute, NoNumber, SwitchesInside, SwitchesInStep])
def test_equals_one_device(model, schedule):
    script = Script(model, lambda: vectors(48), trainer={"limit_val_batches": 0})
    expected = script.plain()
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE


REFUSED = {
    "state of an earlier call": (Remembers, {}, "inside 'cell': it reads the tensor 'state'"),
    "part of the loss": (
        ReadsPenalty,
        {},
        r"reads the tensor self.front.\d.penalty, which a",
    ),
    "list of a hook": (
        Gathers,
        {},
        r"training_step uses a tensor of shape \(\) that was made inside of self.net and is no p.*"
        r"by way of a hook.*depends on self.net.\d.bias.*Let the forward return it",
    ),
    "object": (GathersElsewhere, {}, r"training_step uses a tensor of shape \(\) that was made in"),
    "global list": (
        Perceives,
        {},
        r"a tensor of shape \(.*, 12\) that was made inside",
    ),
    "attribute of a hook": (SetByHook, {}, "that was made inside of self.net and is no part of"),
    "validation alone": (GathersInValidation, {}, "validation_step uses a tensor of shape"),
    "log in a forward": (LogsInside, {}, "The forward of self.net logs"),
    "tied by data": (TiedData, {}, "'net.2.weight' and 'net.4.weight' of TiedData share memory"),
    "autocast": (AutocastsLater, {}, "under autocast or grad modes that it did not have"),
    "later batch": (FreezesLater, {}, "training_step switched the mode or"),
    "forward of a norm": (HasOwnNorm, {"deferred_batch_norm": True}, "OwnNorm has one of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    model, arguments, text = REFUSED[case]
    trainer = {"limit_val_batches": 0}
    if "validation" in case:  # which comes behind an epoch of training
        trainer = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
    script = Script(model, lambda: vectors(48), trainer=trainer)
    with pytest.raises(RankFailed) as failure:
        script.pipelined(2, **arguments)
    assert re.search(text, str(failure.value))


def test_update_by_what_is_subtracted_from():
    from lightning_pipeline.errors import ElsewhereError
    from lightning_pipeline.splitting import is_elsewhere, release

    module = nn.Linear(2, 2)
    release(module, (), {"weight": (1,), "bias": (1,)})
    with torch.no_grad():
        assert is_elsewhere(1 - module.weight)
        with pytest.raises(ElsewhereError, match="weight"):
            torch._foreach_lerp_(self=[module.weight], tensors1=[module.weight], weight=0.1)


def test_a_constant_that_a_call_makes_is_no_part_of_it():
    """Other ranks make it as well, when they ask for what this one keeps, e.g. in a cache."""
    from lightning_pipeline.steps.leftovers import Leftovers

    module, x = Perceptron(), torch.ones(2, 6)
    leftovers = Leftovers(module)
    leftovers.begin("net", module.net, (x,))
    constant, result = torch.arange(3), x * 2
    leftovers.note_made((3,), constant)
    leftovers.look(constant)
    assert leftovers.leaked is None
    leftovers.note_made((x, 2), result)
    leftovers.look(result)
    assert leftovers.leaked == (result, "self.net")
