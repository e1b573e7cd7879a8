"""Tensors at stage boundaries and the question which backward may be split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.boundary import can_split, cross, leaves_of


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nn.Linear(5, 5)(x),
        lambda x: (x * 2).transpose(0, 1),
        lambda x: (x * 2)[1:],
        lambda x: (x * 2).expand(2, 3, 4, 5),
        lambda x: x * 2,
    ],
)
def test_what_crosses_is_dense_no_view_and_in_the_graph(make):
    x = torch.randn(3, 4, 5, requires_grad=True)
    y = make(x)
    crossed = cross(y)
    assert torch.equal(crossed, y)
    assert crossed.is_contiguous() and not crossed._is_view()
    weights = torch.randn(crossed.shape)
    [own] = torch.autograd.grad(crossed, x, weights, retain_graph=True)
    [direct] = torch.autograd.grad(y, x, weights)
    assert torch.equal(own, direct)
    crossed.detach_()  # what split backward does with a stage's outputs


def test_gradients_arrive_dense():
    x = torch.randn(3, 4, requires_grad=True)
    seen = []
    inner = cross(x)
    x.register_hook(lambda grad: seen.append(grad.is_contiguous()))
    inner.sum().backward()
    assert seen == [True]


def test_values_without_gradient_stay_so():
    assert not cross(torch.arange(3)).requires_grad


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


LAYER, OTHER = nn.Linear(4, 4), nn.Linear(4, 4)
ATTENTION = nn.MultiheadAttention(4, 2)


@pytest.mark.parametrize(
    ("stage", "answer"),
    [
        (lambda x: [LAYER(x)], True),
        (lambda x: [OTHER(LAYER(x).relu()) + x], True),
        (lambda x: [LAYER(x), OTHER(x)], True),
        (lambda x: [LAYER(x) + OTHER.weight.sum()], True),
        # another path, which no input enters
        (lambda x: [LAYER(x), OTHER(torch.ones(4))], False),
        (lambda x: [LAYER(x.detach())], False),
        # a weight that is used twice
        (lambda x: [LAYER(LAYER(x))], False),
        (lambda x: ATTENTION(*[x.unsqueeze(0)] * 3)[:1], True),
        (lambda x: ATTENTION(x, x, x)[:1], False),  # two parts of one weight
        # opaque nodes would run twice
        (lambda x: [Twice.apply(LAYER(x))], False),
        # what was not saved would be computed twice
        (lambda x: [checkpoint(LAYER, x, use_reentrant=False)], False),
        (lambda x: [cross(LAYER(cross(x)))], True),
    ],
)
def test_which_stages_split(stage, answer):
    x = torch.randn(2, 4, requires_grad=True)
    assert can_split(stage(x), [x]) is answer


def test_a_stage_without_differentiable_input_does_not_split():
    x = torch.randn(2, 4)
    assert not can_split([LAYER(x)], [x, torch.ones(1)])


def test_leaves_of_a_graph():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    z = (x * 2 + y.detach()).sum()
    assert leaves_of([z]) == {id(x)}
    assert leaves_of([z, y]) == {id(x), id(y)}
