"""Small models, ordinary and awkward, that the tests cut into stages."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """How to make a model and its arguments.

    Attributes:
        make: Makes the model.
        inputs: Makes the arguments for a batch size and a length (or image size).
        sizes: Batch size and length pairs; the first is the one that it is placed with.
        dtype: Precision of the comparison.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Arguments]
    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float64


ZOO: dict[str, Model] = {}


def images(batch: int, size: int) -> Arguments:
    return (torch.randn(batch, 3, size, size),), {}


def vectors(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, WIDTH),), {}


def sequences(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {}


def register(
    inputs: Callable[[int, int], Arguments] = sequences,
    sizes: tuple[tuple[int, int], ...] = ((4, 8), (3, 5)),
    dtype: torch.dtype = torch.float64,
) -> Callable[[Any], Any]:
    """Put a class or a function that makes a model into the zoo."""

    def add(make: Any) -> Any:
        ZOO[make.__name__] = Model(make, inputs, sizes, dtype)
        return make

    return add


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Chain(nn.Module):
    """Layers one after another; the awkward models change what runs between them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


# ---- ordinary


@register(vectors, ((4, 1), (3, 1)))
def mlp() -> nn.Module:
    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, 32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, WIDTH)
        )
        for _ in range(5)
    ]
    return nn.Sequential(*blocks)


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, stride, 1, bias=False)
        self.bn2, self.relu = nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@register(images, ((4, 16), (3, 20)))
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(True))
        widths = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 2), (24, 24, 1)]
        self.blocks = nn.Sequential(*(Bottleneck(*width) for width in widths))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.drop = causal, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, 4, width // 4).transpose(1, 2) for t in parts)
        rate = 0.1 if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=self.causal)
        return self.drop(self.proj(out.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.ln1, self.attention = nn.LayerNorm(WIDTH), Attention(causal)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


@register(images, ((4, 16), (3, 16)))
class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@register(images, ((4, 16), (3, 21)))
class UNet(nn.Module):
    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList(self.convs(i, o) for i, o in zip([3, *widths], widths[:-1]))
        self.middle = self.convs(widths[-2], widths[-1])
        pairs = list(zip(widths[:-1], widths[1:], strict=True))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in pairs)
        self.merge = nn.ModuleList(self.convs(o, i) for i, o in pairs)
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def convs(inner: int, outer: int) -> nn.Module:
        conv = nn.Conv2d(inner, outer, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = up(x)
            if x.shape != skip.shape:
                x = F.pad(x, [0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]])
            x = merge(torch.cat([skip, x], 1))
        return self.out(x)


def tokens(batch: int, length: int) -> Arguments:
    ids = torch.randint(0, 31, (batch, length + 1))
    return (ids[:, :-1],), {"targets": ids[:, 1:]}


@register(tokens)
class GPT(nn.Module):
    """Tied embeddings, a loss inside, positions that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(31, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert ids.size(1) <= 32
        x = self.embed(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def padded(batch: int, length: int) -> Arguments:
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[:, -1] = True
    return (torch.randn(batch, length, WIDTH),), {"src_key_padding_mask": mask}


@register(padded)
def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@register(lambda b, t: ((torch.randn(b, t, WIDTH), torch.randn(b, t - 2, WIDTH)), {}))
def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=True)


@register()
class LSTMs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for rnn in self.rnns:
            x, (h, _) = rnn(x)
        return self.out(x), h


# ---- awkward: control flow and data structures


@register(sizes=((4, 8), (3, 20), (1, 5)))
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


@register()
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


@register()
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


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sigmoid()


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.gate(x)


@register()
class CollectedByHooks(nn.Module):
    """The root takes the gates' outputs by hooks that it installs for the time of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates: list[Tensor] = []
        hooks = [
            layer.gate.register_forward_hook(lambda module, args, out: gates.append(out))
            for layer in self.layers
        ]
        for layer in self.layers:
            x = layer(x)
        for hook in hooks:
            hook.remove()
        return x, torch.stack(gates).mean()


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


@register()
class InplaceInput(Chain):
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


@register(vectors, ((8, 1), (5, 1)))
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


@register()
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


@register()
class BufferRebound(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingLayer() for _ in range(4))


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
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.3, self.training)
        return x


@register(dtype=torch.float32)
class Contexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = linears(3), linears(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.backbone:
                x = layer(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.head:
                x = layer(x) + torch.matmul(x, x.mT).mean()
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


# ---- awkward: Python around the modules


class LayerDrop(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and self.draw() < 0.5 else self.b(self.a(x).relu())


@register()
class LayerDrops(Chain):
    def __init__(self) -> None:
        super().__init__()
        draws = [random.random, np.random.rand]
        self.layers = nn.ModuleList(LayerDrop(draws[k % 2]) for k in range(6))


@register()
class HookedContainers(nn.Module):
    """Hooks on containers, which would never run if the containers were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.layers[1].register_forward_hook(lambda module, args, out: out * 2)
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
