"""What a run says of its plan: once, with names that make the same cut, and what stays whole."""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.distributed.fits import Script
from tests.distributed.test_exactness import images, vectors
from tests.distributed.test_refusals import ValueDependent
from tests.models.modules import BatchNormCNN, Perceptron


def plan_of(trainer, module):
    return trainer.strategy.plan


class Attention(nn.Module):
    """Half of it is code between its linear layers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        for _ in range(4):
            v = torch.softmax(q * k, dim=-1) * v
        return self.out(v)


class Attentive(Perceptron):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Attention(), nn.Linear(6, 3))


@functools.cache
def plans(model, partition):
    script = Script(model, lambda: vectors(32), trainer={"max_steps": 1}, after=plan_of)
    arguments = {} if partition is None else {"partition": partition}
    return [run.extra for run in script.pipelined(2, schedule="Interleaved1F1B", **arguments)]


def test_the_partition_that_is_printed_makes_the_same_stages():
    plan, same = plans(Perceptron, None)
    assert plan == same and plan.partition and len(plan.partition) == 3
    again = plans(Perceptron, plan.partition)[0]
    assert again == plan
    other = (*plan.partition[:-1], "net.8")
    assert other != plan.partition and plans(Perceptron, other)[0].stages != plan.stages


def test_a_cut_between_submodules_is_named():
    plan = plans(Attentive, None)[0]
    assert plan.partition is None
    assert set(plan.cuts) == {"net.0.qkv ... | ... net.0.out"}
    assert "\ncut at net.0.qkv ... | ... net.0.out, " in str(plan)
    assert plan.stages[1].modules == ("net.0 (own code)",)


def test_what_stays_whole_is_noted():
    script = Script(ValueDependent, lambda: vectors(32), trainer={"max_steps": 1}, after=plan_of)
    script.setup = append_layer
    note = script.pipelined(2)[0].extra.notes[-1]
    assert note.startswith("net.0 stays whole, with ") and "% of the cost: " in note
    assert plans(Perceptron, None)[0].notes == ()


def append_layer(module):
    module.net = nn.Sequential(module.net, nn.Linear(3, 3))


def test_it_is_printed_once(capfd):
    def after(trainer, module):
        trainer.test(module, script.loader(images(16)[1]), verbose=False)

    script = Script(TestedCNN, lambda: images(32), trainer={"max_steps": 2}, after=after)
    script.pipelined(2)
    text = capfd.readouterr()
    assert text.out.count("1F1B: 2 stages on 2 ranks") == 1
    assert (text.out + text.err).count("normalises each microbatch by itself") == 1


class TestedCNN(BatchNormCNN):
    __test__ = False

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)
