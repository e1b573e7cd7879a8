"""Small models whose weights are computed, of odd kinds or lazy, and whose buffers are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.models.parameters import WIDTH, Make, Regression, case

COMPUTED: dict[str, Make] = {}
WRITTEN: dict[str, Make] = {}
ODD: dict[str, Make] = {}
LAZY: dict[str, Make] = {}


# ---- weights that are computed


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], Regression]:
    """A model with ``change`` applied to all its linear layers."""

    def make() -> Regression:
        model = Regression()
        for layer in model.net:
            if isinstance(layer, nn.Linear):
                change(layer)
        return model

    return make


COMPUTED["weight_norm by hooks"] = changed(nn.utils.weight_norm)
COMPUTED["weight_norm"] = changed(parametrizations.weight_norm)
COMPUTED["orthogonal"] = changed(parametrizations.orthogonal)
WRITTEN["spectral_norm by hooks"] = changed(nn.utils.spectral_norm)
WRITTEN["spectral_norm"] = changed(parametrizations.spectral_norm)


@case(COMPUTED, "weights cached in the step")
class CachedWeights(Regression):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])
        parametrizations.weight_norm(self.net[8])

    def training_step(self, batch, batch_idx):
        with parametrize.cached():
            return super().training_step(batch, batch_idx)


@case(COMPUTED, "class weights in the loss")
class ClassWeights(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.2, 0.3, 0.5]))
        self.register_buffer("once", torch.tensor([0.5]), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return ((self(x) * self.once - y).square() * self.weights).mean()


class Frozen(nn.BatchNorm1d):
    """Does not listen to ``train``, as in detection."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


@case(COMPUTED, "BatchNorm that stays in eval mode")
class FrozenNorm(Regression):
    def __init__(self) -> None:
        super().__init__()
        norms = [Frozen(WIDTH).eval(), Frozen(WIDTH).eval()]
        norms[1].running_mean.uniform_(-1, 1)
        self.net = nn.Sequential(self.net[0], norms[0], *self.net[1:8], norms[1], *self.net[8:])


@case(COMPUTED, "BatchNorm that was put in eval mode")
class FrozenBefore(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*self.net[:4], nn.BatchNorm1d(WIDTH).eval(), *self.net[4:])


@case(COMPUTED, "the model's train keeps BatchNorm in eval mode")
class FrozenByParent(FrozenBefore):
    def train(self, mode: bool = True) -> FrozenByParent:
        super().train(mode)
        self.net[4].eval()
        return self


# ---- buffers that a forward writes


class Counts(nn.Module):
    """Sums what passes, and counts, in buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("total", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.seen |= (x.detach() > 1.0).any(0)
            self.total.add_(x.detach().sum(0))
        return x + self.total / 1000


@case(WRITTEN, "in place")
class Written(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Counts(), *self.net[:8], Counts(), *self.net[8:])


@case(WRITTEN, "bound anew")
class Rebound(Regression):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps = self.steps + 1
            return self.linear(x) / (1 + self.steps / 100)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Scaled(), *self.net[:8], self.Scaled(), *self.net[8:])


@case(WRITTEN, "a module that is used twice")
class WrittenTwice(Regression):
    def __init__(self) -> None:
        super().__init__()
        counts = Counts()
        self.net = nn.Sequential(*self.net[:3], counts, self.net[3], counts, *self.net[4:])


@case(WRITTEN, "running statistics of other layers")
class RunningStatistics(Regression):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        split, join = nn.Unflatten(1, (2, 3)), nn.Flatten()
        self.net = nn.Sequential(*self.net[:3], split, norm, join, *self.net[3:])


# ---- odd kinds


@case(ODD, "complex")
class Complex(Regression):
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Filter(), *self.net[:8], self.Filter(), *self.net[8:])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@case(ODD, "complex between the layers")
class ComplexBetween(Regression):
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(*(self.Mix() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.fft.irfft(self.mix(torch.fft.rfft(x)), n=WIDTH))


@case(ODD, "integers, bits and half precision")
class Kinds(Regression):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
            self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
            self.register_buffer("small", torch.full((WIDTH,), 0.5, dtype=torch.float16))
            self.register_buffer("brain", torch.full((WIDTH,), 0.25, dtype=torch.bfloat16))
            self.register_buffer("tiny", torch.full((WIDTH,), 3, dtype=torch.uint8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(self.mask, x[:, self.order] * self.small, x * self.brain * self.tiny)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Odd(), *self.net[:8], self.Odd(), *self.net[8:])


@case(ODD, "none and one element")
class Sizes(Regression):
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))
            self.gain = nn.Parameter(torch.ones(()))
            self.register_buffer("void", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain + self.empty.sum() + self.void.sum()

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Sized(), *self.net[:8], self.Sized(), *self.net[8:])


@case(ODD, "in lists and dicts")
class Lists(Regression):
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.eye(WIDTH) for _ in range(3))
            self.scales = nn.ParameterDict({"class": torch.ones(WIDTH), "other-1": torch.ones(1)})
            self.biases = nn.ParameterDict({"0": nn.Parameter(torch.zeros(WIDTH))})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = (x @ weight).tanh()
            return x * self.scales["class"] * self.scales["other-1"] + self.biases["0"]

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Listed(), *self.net[:8], self.Listed(), *self.net[8:])


@case(ODD, "attention with its own sizes of keys and values")
class Attention(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            WIDTH, 2, kdim=3, vdim=2, bias=False, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[:6](x)[:, None]
        keys = torch.stack([x[:, :3], x[:, 3:]], 1)
        values = torch.stack([x[:, :2], x[:, 4:]], 1)
        return self.net[6:](self.attention(hidden, keys, values)[0][:, 0])


@case(ODD, "modules between the weights that have none")
class NoWeights(Regression):
    def __init__(self) -> None:
        super().__init__()
        shapes = (nn.Unflatten(1, (2, 3)), nn.Softplus(), nn.Flatten())
        self.net = nn.Sequential(self.net[0], *shapes, nn.Softplus(), *self.net[1:])


@case(LAZY, "linear and norm")
class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        first = (nn.LazyLinear(WIDTH), nn.Tanh())
        self.net = nn.Sequential(*first, *self.net[2:9], nn.LazyLinear(WIDTH), self.net[10])


@case(LAZY, "convolution")
class LazyImages(Regression):
    def __init__(self) -> None:
        super().__init__()
        convs = (nn.LazyConv1d(4, 3, padding=1), nn.Tanh(), nn.LazyConv1d(2, 3), nn.Tanh())
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, WIDTH)), *convs, nn.Flatten(), nn.LazyLinear(WIDTH), *self.net[6:]
        )


@case(LAZY, "in groups of the optimizer")
class LazyInGroups(Lazy):
    def configure_optimizers(self):
        groups = [{"params": self.net[:3].parameters()}, {"params": self.net[3:].parameters()}]
        return torch.optim.AdamW(groups, lr=1e-2)


@case(WRITTEN, "a lazy norm")
class LazyNorm(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], nn.LazyBatchNorm1d(), *self.net[1:])
        self.net[0] = nn.LazyLinear(WIDTH)
