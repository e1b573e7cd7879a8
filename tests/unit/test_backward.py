"""A backward in two parts against autograd's own."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.backward import _Walk, is_worth_fusing, split_backward
from lightning_pipeline.boundary import cross
from lightning_pipeline.uses import KINDS

ROWS, WIDTH = 6, 4


class Noted(torch.autograd.Function):
    """Twice its input; notes when its backward runs."""

    runs: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        Noted.runs.append(ctx.name)
        return 2 * grad, None


class Stage(nn.Module):
    """Layers, and what is done with them."""

    def __init__(self, run, **layers) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x):
        out = self.run(self, x)
        return out if isinstance(out, tuple) else (out,)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def stage(run, **layers):
    return lambda: Stage(run, **layers)


def ids_of(x):
    return x.detach().sum(-1).abs().long() % 5


def padded():
    return nn.Embedding(5, WIDTH, padding_idx=0)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(1))


def changed(y):
    y.register_hook(lambda grad: grad.clamp(-0.5, 0.5) * 3)
    return y


def in_front(y):
    y.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    return y


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


def hooked(layer):
    layer.weight.register_hook(lambda grad: 3 * grad)
    return layer


def listened(layer):
    def triple(weight):
        weight.grad.mul_(3)

    layer.weight.register_post_accumulate_grad_hook(triple)
    return layer


# How it is made, and how many operations have weights that wait.
def stages():
    return {
        "linear": (stage(lambda m, x: m.a(x), a=linear()), 1),
        "linear on three dims": (stage(lambda m, x: m.a(x.view(2, 3, -1)), a=linear()), 1),
        "two": (stage(lambda m, x: m.b(m.a(x).relu()), a=linear(), b=linear()), 2),
        "norms": (
            stage(lambda m, x: m.n(m.a(x)), a=linear(), n=nn.LayerNorm(WIDTH)),
            1,
        ),
        "used twice": (stage(lambda m, x: m.a(m.a(x).tanh()), a=linear()), 2),
        "around another": (stage(lambda m, x: m.a(m.b(m.a(x))), a=linear(), b=linear()), 3),
        "by hand": (stage(lambda m, x: x @ m.a.weight, a=linear()), 1),
        "by hand, transposed": (stage(lambda m, x: x @ m.a.weight.t(), a=linear()), 1),
        "scaled product": (
            stage(lambda m, x: torch.addmm(m.a.bias, x, m.a.weight, alpha=2), a=linear()),
            0,
        ),
        "weight used as a number too": (
            stage(lambda m, x: m.a(x) + m.a.weight.sum(), a=linear()),
            0,
        ),
        "bias used as a number too": (stage(lambda m, x: m.a(x) + m.a.bias.sum(), a=linear()), 0),
        "transposition used by another operation": (
            stage(
                lambda m, x: (lambda w: x @ w + (x[:, None] * w).sum(1))(m.a.weight.t()), a=linear()
            ),
            0,
        ),
        "tied embedding and head": (
            stage(lambda m, x: F.linear(m.e(ids_of(x)) + x, m.e.weight), e=nn.Embedding(5, WIDTH)),
            2,
        ),
        "embedding with padding": (
            stage(lambda m, x: m.a(m.e(ids_of(x)) + x), e=padded(), a=linear()),
            2,
        ),
        "embedding by frequency": (
            stage(
                lambda m, x: m.e(ids_of(x)) + x, e=nn.Embedding(5, WIDTH, scale_grad_by_freq=True)
            ),
            0,
        ),
        "sparse embedding": (
            stage(lambda m, x: m.e(ids_of(x)) + x, e=nn.Embedding(5, WIDTH, sparse=True)),
            0,
        ),
        "attention": (
            stage(lambda m, x: m.a(*[x.view(2, 3, -1)] * 3)[0], a=nn.MultiheadAttention(WIDTH, 2)),
            2,
        ),
        "encoder layer": (
            stage(
                lambda m, x: m.a(x.view(2, 3, -1)),
                a=nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
            ),
            4,
        ),
        "convolution": (
            stage(
                lambda m, x: m.n(m.c(x.view(2, 3, 2, 2))).relu_(),
                c=nn.Conv2d(3, 5, 2, padding=1),
                n=nn.BatchNorm2d(5),
            ),
            1,
        ),
        "grouped convolution without bias": (
            stage(lambda m, x: m.c(x.view(2, 4, 3)), c=nn.Conv1d(4, 8, 2, groups=2, bias=False)),
            1,
        ),
        "transposed convolution": (
            stage(lambda m, x: m.c(x.view(2, 3, 2, 2)), c=nn.ConvTranspose2d(3, 5, 2, stride=2)),
            1,
        ),
        "circular convolution": (
            stage(
                lambda m, x: m.c(x.view(2, 3, 4)),
                c=nn.Conv1d(3, 5, 3, padding=1, padding_mode="circular"),
            ),
            1,
        ),
        "frozen weight": (stage(lambda m, x: m.a(x), a=frozen(linear(), "weight")), 0),
        "frozen bias": (stage(lambda m, x: m.a(x), a=frozen(linear(), "bias")), 1),
        "weight norm": (stage(lambda m, x: m.a(x), a=parametrizations.weight_norm(linear())), 0),
        "low rank": (
            stage(lambda m, x: F.linear(x, m.a.weight @ m.b.weight), a=linear(), b=linear()),
            0,
        ),
        "the input elsewhere": (stage(lambda m, x: m.a(x.detach()), a=linear()), 1),
        "another path": (
            stage(lambda m, x: (m.a(x), m.b(torch.ones(2, WIDTH))), a=linear(), b=linear()),
            1,
        ),
        "weight as output": (stage(lambda m, x: (m.a(x), m.a.weight), a=linear()), 0),
        "input as output": (stage(lambda m, x: (m.a(x), x), a=linear()), 1),
        "output twice": (stage(lambda m, x: (lambda y: (y, y))(m.a(x)), a=linear()), 1),
        "hook on a weight": (stage(lambda m, x: m.a(x), a=hooked(linear())), 0),
        "hook behind the accumulation": (stage(lambda m, x: m.a(x), a=listened(linear())), 0),
        "hook behind the accumulation of a norm": (
            stage(lambda m, x: m.n(x), n=listened(nn.LayerNorm(WIDTH))),
            0,
        ),
        "hook on an output": (
            stage(lambda m, x: changed(m.b(changed(m.a(x)).relu())), a=linear(), b=linear()),
            2,
        ),
        "hook on the output of a first layer": (
            stage(lambda m, x: m.b(changed(m.a(x.detach())).relu()), a=linear(), b=linear()),
            2,
        ),
        "hook on the output of a convolution": (
            stage(
                lambda m, x: changed(m.c(x.view(2, 3, 2, 2))).relu(),
                c=nn.Conv2d(3, 5, 2, padding=1),
            ),
            1,
        ),
        "hook in front of an operation": (stage(lambda m, x: in_front(m.a(x)), a=linear()), 1),
        "bias of one number": (
            stage(lambda m, x: torch.addmm(m.one.value, x, m.a.weight), a=linear(), one=One()),
            1,
        ),
        "own function": (stage(lambda m, x: Noted.apply(m.a(x), "x"), a=linear()), 1),
        "checkpoint": (
            stage(
                lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=linear(), b=linear()
            ),
            1,
        ),
        "reentrant checkpoint": (
            stage(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)), a=linear(), b=linear()),
            None,
        ),
        "recurrent": (stage(lambda m, x: m.a(x.view(2, 3, -1))[0], a=nn.LSTM(WIDTH, 5, 2)), None),
        "complex": (
            stage(
                lambda m, x: (x.to(torch.complex128) @ m.a.weight).real,
                a=nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.complex128),
            ),
            0,
        ),
    }


def run(module, split, rounds=3):
    """Gradients of inputs and weights after some microbatches that add up."""
    torch.manual_seed(1)
    module.zero_grad()
    of_inputs = []
    for _ in range(rounds):
        leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
        outputs = module(cross(leaf))
        grads = [torch.randn_like(out) for out in outputs]
        if split:
            edges = [get_gradient_edge(out) for out in outputs]
            roots = list(zip(edges, grads, strict=True))
            del outputs
            [grad], deferred = split_backward(roots, [leaf])
            of_inputs.append(grad)
            deferred.run()
        else:
            torch.autograd.backward(outputs, grads)
            of_inputs.append(leaf.grad)
    weights = {name: p.grad for name, p in module.named_parameters()}
    return of_inputs, weights


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def made(name):
    torch.manual_seed(0)
    return stages()[name][0]().double()


@pytest.mark.parametrize("name", stages())
def test_both_parts_together_are_the_backward(name):
    torch.set_default_dtype(torch.float64)
    module = made(name)
    inputs, weights = run(module, split=False)
    weights = {n: None if g is None else g.to_dense().clone() for n, g in weights.items()}
    found_inputs, found = run(module, split=True)
    for mine, own in zip(found_inputs, inputs, strict=True):
        assert (mine is None) == (own is None)
        assert own is None or torch.equal(mine, own)
    for name, own in weights.items():
        assert (found[name] is None) == (own is None), name
        # the same numbers added in the same order
        assert own is None or torch.equal(found[name].to_dense(), own), name


@pytest.mark.parametrize("name", [n for n, (_, count) in stages().items() if count is not None])
def test_how_many_weights_wait(name):
    """Else all would be done at once: right, and as slow as without."""
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    outputs = made(name)(cross(leaf))
    walk = _Walk([get_gradient_edge(out).node for out in outputs], [leaf], KINDS)
    assert len([node for node in walk.uses if node in walk.now]) == stages()[name][1]


def test_what_depends_on_weights_alone_waits():
    a, b = linear(), linear()
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    Noted.runs.clear()
    out = Noted.apply(cross(leaf), "input") + Noted.apply(a.bias, "weight")
    out = Noted.apply(out @ b.weight, "input")
    _, deferred = split_backward([(get_gradient_edge(out), torch.ones_like(out))], [leaf])
    assert Noted.runs == ["input", "input"]
    assert a.bias.grad is None and b.weight.grad is None
    deferred.run()
    assert Noted.runs == ["input", "input", "weight"]
    own = torch.full((WIDTH,), 4.0 * ROWS) @ b.weight.t()
    assert (a.bias.grad - own).abs().max() <= 1e-14 * own.abs().max()


def test_first_stages_split_without_an_input():
    """Nothing waits for their first part, but its activations are let go."""
    module, embedding = made("two"), nn.Embedding(5, WIDTH)
    ids = torch.tensor([0, 3, 1, 1, 4, 2])
    out = module(embedding(ids))[0]
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, [embedding.weight, *module.parameters()], grad)
    out = module(embedding(ids))[0]
    found, deferred = split_backward([(get_gradient_edge(out), grad)], [])
    assert found == [] and embedding.weight.grad is None
    deferred.run()
    for weight, own in zip([embedding.weight, *module.parameters()], expected, strict=True):
        assert (weight.grad - own).abs().max() <= 1e-14


def test_first_stages_that_branch_split_too():
    first, second = linear(), linear()
    norm = nn.BatchNorm1d(WIDTH)
    weights = [*first.parameters(), *second.parameters(), *norm.parameters()]
    x = torch.randn(ROWS, WIDTH)

    def forward():
        y = first(x) * 2
        return y + norm(second(y)).tanh()

    out = forward()
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, weights, grad)
    _, deferred = split_backward([(get_gradient_edge(forward()), grad)], [])
    deferred.run()
    for weight, own in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, own)


def test_under_autocast_weights_wait_and_get_what_autograd_gives():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.ReLU(), linear())
    x = torch.randn(ROWS, WIDTH)

    def forward():
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            return leaf, module(cross(leaf))

    leaf, out = forward()
    grad = torch.randn_like(out)
    out.backward(grad)
    own = [p.grad for p in module.parameters()]
    module.zero_grad()
    split, out = forward()
    walk = _Walk([out.grad_fn], [split], KINDS)
    assert len(walk.uses) == 2
    [found], deferred = split_backward([(get_gradient_edge(out), grad)], [split])
    deferred.run()
    assert torch.equal(found, leaf.grad)
    for weight, expected in zip(module.parameters(), own, strict=True):
        assert weight.grad.dtype is torch.float32 and torch.equal(weight.grad, expected)


def test_an_input_written_to_in_between_is_an_error():
    layer, leaf = linear(), torch.randn(ROWS, WIDTH, requires_grad=True)
    given = cross(leaf)
    out = layer(given)
    _, deferred = split_backward([(get_gradient_edge(out), torch.ones_like(out))], [leaf])
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        deferred.run()


def test_what_was_written_to_since_the_forward_is_an_error():
    embedding, layer = nn.Embedding(5, WIDTH), linear()
    ids, x = torch.tensor([0, 3, 1]), torch.randn(3, WIDTH)
    for change in (ids.zero_, lambda: x.add_(1)):
        out = embedding(ids) + layer(x)
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            split_backward([(get_gradient_edge(out), torch.ones_like(out))], [])


def test_gradients_of_weights_are_their_own_memory():
    """What has been sent on is not changed by the next microbatch."""
    shift = nn.Parameter(torch.zeros(ROWS, WIDTH))
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    for _ in range(2):
        out = cross(leaf) + shift
        [grad], deferred = split_backward([(get_gradient_edge(out), torch.ones_like(out))], [leaf])
        deferred.run()
        assert torch.equal(grad, torch.ones_like(grad))
    assert torch.equal(shift.grad, torch.full_like(shift, 2))


@pytest.mark.parametrize(("width", "answer"), [(64, False), (1024, True)])
def test_large_products_are_worth_fusing(width, answer):
    out = nn.Linear(width, width)(torch.ones(1, width))
    edge = get_gradient_edge(out)
    assert is_worth_fusing([edge], 1e10) is answer
    assert not is_worth_fusing([edge], 1e13)


def test_convolutions_are_left_alone_where_products_are_fused():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(8, 5))
    leaf = torch.randn(2, 3, 2, requires_grad=True)
    out = module(cross(leaf))
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, [leaf, *module.parameters()], grad)
    roots = [(get_gradient_edge(module(cross(leaf))), grad)]
    [found], deferred = split_backward(roots, [leaf], products_alone=True)
    assert module[0].weight.grad is not None and module[2].weight.grad is None
    deferred.run()
    for mine, own in zip([found, *(p.grad for p in module.parameters())], expected, strict=True):
        assert (mine - own).abs().max() <= 1e-14
