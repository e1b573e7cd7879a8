"""Tensors at stage boundaries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipeline.boundary import cross, leaves_of


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nn.Linear(5, 5)(x),
        lambda x: (x * 2).transpose(0, 1),
        lambda x: (x * 2)[1:],
        lambda x: (x * 2).expand(2, 3, 4, 5),
        lambda x: x * 2,
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
    ],
)
def test_what_crosses_is_dense_no_view_and_in_the_graph(make):
    x = torch.randn(3, 4, 5, requires_grad=True)
    y = make(x)
    crossed = cross(y)
    assert torch.equal(crossed, y)
    assert crossed.is_contiguous() and not crossed._is_view()
    weights = torch.randn(crossed.shape, dtype=crossed.dtype)
    [own] = torch.autograd.grad(crossed, x, weights, retain_graph=True)
    [direct] = torch.autograd.grad(y, x, weights)
    assert torch.equal(own, direct)


def test_gradients_arrive_dense():
    x = torch.randn(3, 4, requires_grad=True)
    seen = []
    inner = cross(x)
    x.register_hook(lambda grad: seen.append(grad.is_contiguous()))
    inner.sum().backward()
    assert seen == [True]


def test_values_without_gradient_stay_so():
    assert not cross(torch.arange(3)).requires_grad


def test_leaves_of_a_graph():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    z = (x * 2 + y.detach()).sum()
    assert leaves_of([z]) == {id(x)}
    assert leaves_of([z, y]) == {id(x), id(y)}
