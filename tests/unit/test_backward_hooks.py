"""A backward in two parts where a hook or a cast lies on the way to a weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lightning_pipeline.backward import hooks_made, split_backward
from lightning_pipeline.boundary import cross

ROWS, WIDTH = 6, 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(2, 2, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.kept = []


def doubled(tensor):
    tensor.register_hook(lambda grad: 2 * grad)
    return tensor


def node_of(weight):
    return weight.view_as(weight).grad_fn.next_functions[0][0]


def on_transposed(m, x):
    return x @ doubled(m.linear.weight.t())


def on_cast(m, x):
    return x @ doubled(m.weight.to(torch.float32)).to(torch.float64)


def on_made_weight(m, x):
    return x @ doubled(m.weight * m.scale)


def on_made_scale(m, x):
    return x * doubled(m.scale.exp())


def on_made_convolution_weight(m, x):
    return F.conv1d(x.view(3, 2, 4), doubled(m.conv.weight * 1), m.conv.bias)


def on_made_weight_that_is_an_output_too(m, x):
    weight = doubled(m.weight * m.scale)
    return x @ weight, weight


def rounded(m, x):
    return x @ m.weight.to(torch.bfloat16).to(torch.float64)


def complex_product(m, x):
    return ((x * (1 + 2j)) @ m.weight.to(torch.complex128) * (2 - 1j)).real


def complex_linear(m, x):
    weight, bias = (p.to(torch.complex128) for p in (m.linear.weight, m.linear.bias))
    return (F.linear(x * (1 + 2j), weight, bias) * (2 - 1j)).real


def in_front_of_an_operation_without_input(m, x):
    y = m.linear(x.detach())
    y.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    return x + y


def behind_an_operation(m, x):
    y = m.linear(x)
    y.grad_fn.register_hook(lambda given, _: tuple(g if g is None else 2 * g for g in given))
    return y


def legacy_module_hook(m, x):
    if not m.kept:
        m.kept.append(
            m.linear.register_backward_hook(
                lambda _, given, __: tuple(g if g is None else 2 * g for g in given)
            )
        )
    return m.linear(x)


def in_front_of_the_accumulation(m, x):
    if not m.kept:
        m.kept.append(node_of(m.linear.weight))
        m.kept[0].register_prehook(lambda grads: (2 * grads[0],))
    return m.linear(x)


def in_front_of_the_accumulation_of_a_factor(m, x):
    if not m.kept:
        m.kept.append(node_of(m.scale))
        m.kept[0].register_prehook(lambda grads: (2 * grads[0],))
    return m.linear(x) * m.scale


STAGES = [
    on_transposed,
    on_cast,
    on_made_weight,
    on_made_scale,
    on_made_convolution_weight,
    on_made_weight_that_is_an_output_too,
    rounded,
    complex_product,
    complex_linear,
    in_front_of_an_operation_without_input,
    behind_an_operation,
    legacy_module_hook,
    in_front_of_the_accumulation,
    in_front_of_the_accumulation_of_a_factor,
]


def gradients(stage, split):
    torch.manual_seed(0)
    module, leaf = Layers().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    leaf.requires_grad_()
    hooks = hooks_made()
    outputs = stage(module, cross(leaf))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.ones_like(out) for out in outputs]
    if split:
        roots = [(get_gradient_edge(o), g) for o, g in zip(outputs, grads, strict=True)]
        [of_input], deferred = split_backward(roots, [leaf], whole=hooks_made() != hooks)
        deferred.run()
    else:
        torch.autograd.backward(outputs, grads)
        of_input = leaf.grad
    return {"input": of_input, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_both_parts_together_are_the_backward(stage):
    expected, found = gradients(stage, split=False), gradients(stage, split=True)
    for name, own in expected.items():
        assert (found[name] is None) == (own is None), name
        assert own is None or (found[name] - own).abs().max() <= 1e-12 * own.abs().max(), name
