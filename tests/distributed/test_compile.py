"""torch.compile around the module, its parts or its blocks changes no numbers."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch._dynamo.utils import counters

from lightning_pipeline.hooks import without_compilation
from tests.distributed.feeds import Several
from tests.distributed.fits import Script, distance
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


class Calls(Perceptron):
    """Its step calls the module itself."""

    def forward(self, x):
        return self.scale * self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class Block(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + self.layer(x).tanh()


def blocks(count=4):
    return nn.Sequential(nn.Linear(6, 12), *(Block() for _ in range(count)), nn.Linear(12, 3))


def whole():
    return torch.compile(Perceptron(), backend="eager")


def whole_in_place():
    module = Calls()
    module.compile(backend="eager")
    return module


def part():
    module = Perceptron()
    module.net = torch.compile(blocks(), backend="aot_eager")
    return module


def part_in_place():
    module = Perceptron()
    module.net = blocks()
    module.net.compile(backend="eager")
    return module


def parts():
    module = Perceptron()
    module.net = blocks()
    for index in range(1, 5):
        module.net[index] = torch.compile(module.net[index], backend="eager")
    return module


def parts_in_place():
    module = Perceptron()
    module.net = blocks()
    for index in range(1, 5):
        module.net[index].compile(backend="eager")
    return module


class CallsAHelper(Calls):
    def compute(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.compute(batch)


def helper():
    """What the step calls is compiled, and calls a module."""
    module = CallsAHelper()
    module.compute = torch.compile(module.compute, backend="eager")
    return module


def graphs(trainer, module):
    return counters["stats"]["unique_graphs"]


def uncompiled():
    module = Perceptron()
    module.net = blocks()
    return module


# Of a compiled LightningModule whose step logs plain Lightning 2.6 makes an error on torch 2.13.
COMPILED = {
    whole: Perceptron,
    whole_in_place: Calls,
    part: uncompiled,
    part_in_place: uncompiled,
    parts: uncompiled,
    parts_in_place: uncompiled,
    helper: CallsAHelper,
}


@pytest.mark.slow
def test_compiled_equals_one_device():
    def several(makers):
        trainer = {"max_steps": 3, "limit_val_batches": 2}
        return Several(
            {c.__name__: Script(m, lambda: vectors(48), trainer=dict(trainer)) for c, m in makers}
        )

    [expected] = several(COMPILED.items()).plain()
    for runs in several([(make, make) for make in COMPILED]).pipelined(2):
        for name, run in runs.items():
            run.state = {key.replace("_orig_mod.", ""): t for key, t in run.state.items()}
            assert distance(run, expected[name]) <= TOLERANCE, name
            assert run.metrics == pytest.approx(expected[name].metrics, rel=1e-12), name


@pytest.mark.parametrize("make", [parts, parts_in_place])
def test_blocks_stay_compiled(make):
    """No graph is made after the first step, however many microbatches there are."""
    found = set()
    for steps in (1, 4):
        trainer = {"max_steps": steps, "limit_val_batches": 0}
        script = Script(make, lambda: vectors(64), trainer=trainer, after=graphs)
        runs = script.pipelined(2, schedule="Interleaved1F1B")
        found.add(tuple(run.extra for run in runs))
    assert len(found) == 1 and min(found.pop()) > 0


def test_compiled_steps_are_taken_back_with_a_warning():
    module = from_compiled(whole())
    with pytest.warns(UserWarning, match="not compiled. Compile the blocks of the model instead"):
        without_compilation(module)
    assert module.training_step.__func__ is Perceptron.training_step
