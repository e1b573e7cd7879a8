"""Blocks with names, and nets that are put together from them in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


def layer(inner: int = WIDTH, outer: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, outer), nn.Tanh())


class Pair(nn.Module):
    """Answers with a tuple and a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.left(x), {"right": self.right(x), "none": None, "count": 2}


class Options(nn.Module):
    """Asks for keyword arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
        out = self.linear(x) * scale
        return out if mask is None else out.masked_fill(mask, 0.0)


class Attention(nn.Module):
    """Heads without a bias, which would have no gradient but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Reads(nn.Module):
    """Branches on values, so that it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out if bool(torch.isfinite(out).all()) else torch.zeros_like(out)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


class Counted(nn.Module):
    """Writes to a buffer in every forward of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return self.linear(x - self.mean)


class Normed(nn.Module):
    """BatchNorm behind what is no constant of a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.tanh()).transpose(1, 2)).transpose(1, 2)


Block = Callable[["Net", Any, Tensor, list[Tensor]], Tensor]
BLOCKS: dict[str, tuple[Callable[[], nn.Module], Block]] = {}
EACH_MICROBATCH = ("counted", "batch norm", "spectral norm")
"""Blocks that see or count microbatches."""
NOT_CALLED = ("list", "shared", "merged dims", "parameter", "buffer", "noise", "complex")
"""Blocks whose module does not run by itself, so that no stage can begin with it."""
RANDOM = ("dropout", "functional dropout", "noise")
SEVERAL_USES = ("twice", "first again", "shared", "tied", "merged dims", "parameter", "complex")
"""Blocks whose weights others use as well: the parts of a gradient add up in another order."""
OTHER_STRIDES = ("convolution",)
"""Blocks whose output is not contiguous, as which it travels: products of it round differently."""
NEEDS_WIDE_NUMBERS = ("recurrence", "complex", "spectral norm", "weight norm", "reads values")


def block(name: str, make: Callable[[], nn.Module] = nn.Identity) -> Callable[[Block], Block]:
    def add(function: Block) -> Block:
        BLOCKS[name] = make, function
        return function

    return add


block("linear", layer)(lambda net, own, x, seen: own(x))
block("in place", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))(
    lambda net, own, x, seen: own(x) + x
)
block("residual", lambda: nn.Sequential(nn.LayerNorm(WIDTH), layer(), nn.Linear(WIDTH, WIDTH)))(
    lambda net, own, x, seen: x + own(x)
)
block("skip", lambda: nn.Linear(2 * WIDTH, WIDTH))(
    lambda net, own, x, seen: own(torch.cat([x, seen[len(seen) // 2]], -1))
)
block("first again", layer)(lambda net, own, x, seen: own(x) + seen[0] * net.gain)
block("shared")(lambda net, own, x, seen: x + net.shared(x).tanh())
block("twice", layer)(lambda net, own, x, seen: own(own(x)))
block("nested", lambda: nn.Sequential(layer(), nn.Sequential(layer(), nn.Identity())))(
    lambda net, own, x, seen: own(x)
)
block("list", lambda: nn.ModuleList(layer() for _ in range(2)))(
    lambda net, own, x, seen: torch.stack([part(x) for part in own]).sum(0)
)
block("attention", Attention)(lambda net, own, x, seen: x + own(x))
block("convolution", lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1))(
    lambda net, own, x, seen: own(x.transpose(1, 2)).transpose(1, 2)
)
block("options", Options)(lambda net, own, x, seen: own(x, scale=0.7, mask=x > 1))
block("frozen", lambda: layer().requires_grad_(False))(lambda net, own, x, seen: own(x) + x)
block("merged dims")(lambda net, own, x, seen: net.shared(x.reshape(-1, x.shape[-1])).view_as(x))
block("parameter")(lambda net, own, x, seen: x @ net.matrix)
block("buffer")(lambda net, own, x, seen: x * net.mask + net.offset)
block("tied", lambda: nn.Linear(WIDTH, WIDTH))(lambda net, own, x, seen: own(x).tanh())
block("recomputed", Recomputed)(lambda net, own, x, seen: x + own(x))
block("reads values", Reads)(lambda net, own, x, seen: own(x))
block("counted", Counted)(lambda net, own, x, seen: own(x))
block("batch norm", Normed)(lambda net, own, x, seen: own(x))
block("dropout", lambda: nn.Sequential(layer(), nn.Dropout(0.3)))(
    lambda net, own, x, seen: x + own(x)
)
block("functional dropout", layer)(
    lambda net, own, x, seen: F.dropout(own(x), 0.2, net.training) + x
)
block("noise")(lambda net, own, x, seen: x + 0.1 * torch.randn_like(x))
block("weight norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))(
    lambda net, own, x, seen: own(x)
)
block("spectral norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))(
    lambda net, own, x, seen: own(x)
)


@block("added in place", lambda: nn.Linear(WIDTH, WIDTH))
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    out = own(x)
    out += x
    out[..., 0] = out[..., 1] * 0.5
    return out


@block("gated", lambda: nn.Linear(WIDTH, 2 * WIDTH))
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    left, right = own(x).chunk(2, -1)
    return left * right.sigmoid()


@block("recurrence", lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    out, state = own(x)
    return out + state[-1].unsqueeze(1)


@block("structure", Pair)
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    left, more = own(x)
    assert more["none"] is None
    return left.tanh() + more["right"] / more["count"]


@block("without gradient", layer)
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    with torch.no_grad():
        share = own(x).abs()
    return x + share


@block("detached", layer)
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    return x + own(x.detach())


@block("lookup", lambda: nn.Embedding(4, WIDTH))
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    return x + own((seen[0] > 0).sum(-1).clamp(max=3))


@block("choice", lambda: nn.Linear(WIDTH, WIDTH))
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    positive = x > 0
    return torch.where(positive, own(x), -x)


@block("shape", layer)
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    return own(x) if x.shape[1] > 1 else own(x) * 0.5 + x


@block("complex")
def _(net: Net, own: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * net.gain, n=x.shape[-1]) + x


class Net(nn.Module):
    """Blocks one after another.

    Args:
        blocks: Their names.
        frozen: Places of those that take no gradient.
    """

    def __init__(self, blocks: Sequence[str], frozen: Sequence[int] = ()) -> None:
        super().__init__()
        self.names = tuple(blocks)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.gain, self.matrix = nn.Parameter(torch.ones(())), nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("mask", torch.linspace(0.5, 1, WIDTH))
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(BLOCKS[name][0]() for name in blocks)
        for name, own in zip(blocks, self.blocks, strict=True):
            if name == "tied":
                own.weight = self.shared.weight
        for place in frozen:
            self.blocks[place].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for name, own in zip(self.names, self.blocks, strict=True):
            x = BLOCKS[name][1](self, own, x, seen)
            seen.append(x)
        return x
