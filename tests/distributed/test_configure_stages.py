"""Stages that the user makes by hand, for a forward that cannot be recorded."""

from __future__ import annotations

import functools
import re
from itertools import pairwise

import lightning as L
import pytest
import torch
from torch import nn

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors


class Branching(nn.Module):
    """Branches on the values of each row, so that it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += self.training
        rows = self.linear(x)
        return torch.stack([r.tanh() if r.sum().item() > 0 else r.sigmoid() for r in rows])


class First(nn.Module):
    """Gives more than a tensor to the next stage."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, shift=0.0):
        return self.blocks(x) + shift, None, x


class Last(nn.Module):
    """The last blocks, with a weight of the first one."""

    def __init__(self, blocks, tied):
        super().__init__()
        self.blocks, self.tied = blocks, tied

    def forward(self, x, nothing, skip):
        assert nothing is None
        return (self.blocks(x) + skip) @ self.tied * (1 if self.training else 2)


class Between(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, nothing, skip):
        return self.blocks(x), nothing, skip


class Opaque(L.LightningModule):
    """Its own forward branches on values; it says by hand where to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(8))
        self.head = nn.Linear(6, 3)

    def forward(self, x, shift=0.0):
        y = x
        for block in self.blocks:
            y = block(y) + (shift if block is self.blocks[1] else 0.0)
            if y.sum().item() > 1e9:
                raise OverflowError
        return (y + x) @ self.blocks[0].linear.weight * (1 if self.training else 2)

    def configure_stages(self, num_stages):
        bounds = [2, *(2 + 6 * i // (num_stages - 1) for i in range(1, num_stages))]
        parts = [nn.Sequential(*self.blocks[a:b]) for a, b in pairwise(bounds)]
        last = Last(parts[-1], self.blocks[0].linear.weight)
        return [First(nn.Sequential(*self.blocks[:2])), *map(Between, parts[:-1]), last]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self(x, shift=0.5)), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.head(self(x)), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


SCRIPT = Script(Opaque, lambda: vectors(48), trainer={"limit_val_batches": 2})
reference = functools.cache(SCRIPT.plain)
LAYOUTS = {
    "GPipe": (2, 1),
    "1F1B": (3, 1),
    "InterleavedZeroBubble": (2, 1),
    "ZBVZeroBubble": (2, 1),
    "DualPipeV": (2, 2),
}


@pytest.mark.parametrize("schedule", LAYOUTS)
def test_stages_made_by_hand_equal_one_device(schedule):
    ranks, replicas = LAYOUTS[schedule]
    script = SCRIPT
    expected = reference()
    if replicas > 1:
        script = Script(Opaque, lambda: vectors(96), trainer={"limit_val_batches": 2})
        expected = script.plain(replicas)
    for run in script.pipelined(ranks, replicas, schedule=schedule, num_microbatches=4):
        for name in [name for name in run.state if name.endswith("calls")]:
            expected.state[name] = run.state[name]  # once a microbatch
            assert run.state[name] == 6 * 4
        assert distance(run, expected) <= TOLERANCE
        if replicas == 1:
            assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def unnamed(module):
    module.forward = None  # never reached
    net = nn.Sequential(*module.blocks)
    module.net = net
    module.training_step = lambda batch, batch_idx: nn.functional.mse_loss(
        module.head(net(batch[0])), batch[1]
    )


def returns(stages):
    def change(module):
        module.configure_stages = lambda num_stages: stages(module, num_stages)

    return change


REFUSED = {
    "a generator": (
        returns(lambda m, n: (b for b in m.blocks)),
        {},
        "must return a list of modules, one for each stage, got <generator",
    ),
    "too few": (
        returns(lambda m, n: [m.blocks[0]]),
        {},
        r"Opaque.configure_stages\(2\) must return 2 modules, one for each stage, got 1",
    ),
    "new weights": (
        returns(lambda m, n: [m.blocks[0], nn.Linear(6, 6)]),
        {},
        r"'weight' of stage 1 \(Linear\) is not in Opaque: it would not be trained or saved",
    ),
    "a partition as well": (
        lambda module: None,
        {"partition": "uniform"},
        r"partition='uniform'\) both say where to cut. Remove configure_stages",
    ),
    "another module is called": (
        unnamed,
        {},
        r"stand for the call of self, but the step calls self.*name the module that they make up",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stages_that_cannot_be_used_are_refused(case):
    change, arguments, text = REFUSED[case]
    script = Script(Opaque, lambda: vectors(16), setup=change)
    with pytest.raises(RankFailed) as failure:
        script.pipelined(2, **arguments)
    assert re.search(text, str(failure.value).replace("\n", " "))
