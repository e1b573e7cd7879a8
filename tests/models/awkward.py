"""Awkward models: what recorders of the usual kind refuse, or get wrong in silence."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.ordinary import Block
from tests.models.registry import (
    WIDTH,
    Chain,
    linears,
    register,
    vectors,
)

# ---- awkward: control flow and data structures


@register(
    sizes=((4, 8), (3, 20), (1, 5)),
    separable=False,
    condition="adds a mean over the first sample to all",
)
class ShapeFlow(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == 2:
                x = self.long(x[:, ::2]) if x.shape[1] > 16 else self.short(x)
        for row in x[:1]:
            x = x + row.mean()
        return x.view(x.shape[0] * x.shape[1], -1)


@register(
    lambda b, t: (
        ({"x": torch.randn(b, t, WIDTH), "y": torch.randn(b)},),
        {"scale": 2.0, "flags": {"drop": True}},
    )
)
class Structures(Chain):
    def forward(self, batch: Any, scale: float = 1.0, flags: Any = None) -> Any:
        x, hidden = batch["x"] * scale, []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        if flags is not None and flags.get("drop"):
            hidden = hidden[1:]
        pair = (hidden[0], batch["y"])
        return {"out": x, "hidden": hidden, "count": len(hidden), "none": None, "pair": pair}


class ValueBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


@register(separable=False, condition="branches on a sum over the samples")
class ValueBranches(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ValueBranch() for _ in range(4))


class Router(nn.Module):
    """A mixture of experts whose inside depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = linears(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(-1)
        weight, choice = share.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index).nonzero(as_tuple=True)
            if chosen[0].numel():
                out[chosen] = expert(x[chosen]).relu() * weight[chosen].unsqueeze(-1)
        return x + out, share.mean((0, 1)).pow(2).sum()


@register(separable=False, condition="a loss of routers")
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return x, torch.stack(losses).sum()


# ---- awkward: memory and sharing


@register()
class Inplace(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(WIDTH) % 3 == 0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            view = h[:, :2]
            view.mul_(0.5)
            h[:, -1] = 0.0
            h += x
            h.masked_fill_(self.mask, 0.1)
            x = h
        return x


@register(refusal="writes in place to its argument", only_in_steps=True)
class InplaceInput(Chain):
    """Writes to what the step gives it, which stages that repeat the step would not see."""

    def forward(self, x: Tensor) -> Tensor:
        skip = x[:, :1]
        x.mul_(2.0)
        h = x
        for layer in self.layers:
            h = layer(h).relu()
        return h + x + skip


@register()
class InplaceGrad(Chain):
    """A tensor that needs a gradient only after an in-place addition."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers[:3]:
            total += layer(x)
        for layer in self.layers[3:]:
            total = layer(total).relu()
        return total


@register()
class ModuleTwice(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(super().forward(self.shared(x))) @ self.layers[0].weight.t()


@register(
    vectors,
    ((8, 1), (5, 1)),
    separable=False,
    condition="BatchNorm called twice",
)
class BatchNormTwice(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in (1, 3):
                x = self.norm(x)
        return x


@register(separable=False, condition="writes to buffers")
class BufferWrites(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(2, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        self.steps += 1
        self.queue[0].copy_(x.detach().mean((0, 1)))
        return x + self.queue[1]


class CountingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.b(self.a(x).relu()) / self.steps


@register(separable=False, condition="writes to buffers")
class BufferRebound(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return x * self.layers[-1].steps


@register()
class ParameterLists(nn.Module):
    """State with names that are no attributes, and references past the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(WIDTH)) for _ in range(4))
        self.scales = nn.ParameterDict({"first-one": torch.ones(WIDTH), "class": torch.ones(1)})
        self.layers = linears(2)
        self.by_hand = [layer.weight for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        x = x * self.scales["first-one"] + self.scales["class"]
        return self.layers[1](self.layers[0](x)) @ self.by_hand[0]


# ---- awkward: autograd and ambient state


@register()
class FunctionalDropout(Chain):
    dropout = 0.3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), self.dropout, self.training)
        return x


@register(dtype=torch.float32, separable=False, condition="adds means over the samples; to 1e-6")
class Contexts(nn.Module):
    """Half of it without gradients, half under autocast to bfloat16, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = linears(3), linears(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.backbone:
                x = layer(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.head:
                x = layer(x) + torch.matmul(x, x.mT).mean().tanh()
        return x.float()


@register()
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(functools.partial(layer), x, use_reentrant=False)
        return x


@register()
class FrozenHalf(Chain):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:3]:
            layer.requires_grad_(False)


@register()
def weight_norm() -> nn.Module:
    model = Chain(4)
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer)
    return model


@register()
def compiled_blocks() -> nn.Module:
    model = Chain(0)
    model.layers = nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(3))
    return model


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


reverse_gradient = ReverseGradient.apply


@register()
class GradientReversal(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            reverse = reverse_gradient if index % 2 else ReverseGradient.apply
            x = reverse(layer(x).tanh())
        return x
