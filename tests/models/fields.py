"""Models of images and densities: skips, odd sizes, spectra, likelihoods, gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.registry import WIDTH, Arguments, images, linears, register, vectors

# ---- images: skips, odd sizes, other sizes at the end


class ImageAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1, bias=False), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 2, c // 2, h * w).mT.unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.mT.reshape(b, c, h, w))


class ConditionedBlock(nn.Module):
    """A residual block that is shifted by an embedding."""

    def __init__(self, inner: int, outer: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.shift = nn.Linear(embedding, 2 * outer)
        self.norm2, self.conv2 = nn.GroupNorm(2, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.shift(embedding)[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return self.skip(x) + h


def denoised(batch: int, size: int) -> Arguments:
    return (torch.randn(batch, 3, size, size), torch.randint(0, 100, (batch,))), {}


@register(denoised, ((4, 12), (3, 13)))
class AttentionUNet(nn.Module):
    """The network of a diffusion model: skips across all its depth, any size of image."""

    def __init__(self, width: int = 4, channels: int = 3) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        widths = [(width, width), (width, 2 * width)]
        self.down = nn.ModuleList(ConditionedBlock(a, b, 16) for a, b in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, 2, 1) for _, b in widths)
        self.middle = nn.ModuleList(
            [ConditionedBlock(2 * width, 2 * width, 16), ImageAttention(2 * width)]
        )
        self.up = nn.ModuleList(
            ConditionedBlock(b + c, a, 16)
            for (a, b), c in zip(reversed(widths), [2 * width, width], strict=True)
        )
        self.out = nn.Conv2d(width, channels, 3, padding=1)
        frequencies = torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies[None]
        embedding = self.embed(torch.cat([angles.cos(), angles.sin()], dim=-1))
        x, skips = self.stem(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, embedding)
            skips.append(x)
            x = shrink(x)
        block, attention = self.middle
        x = attention(block(x, embedding))
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1), embedding)
        return self.out(F.silu(x))


@register(images, ((4, 8), (3, 9)))
class SuperResolution(nn.Module):
    """Transposed convolutions, a pixel shuffle, and back to the input's own size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, 8, 3, padding=1), nn.PReLU()) for a in (3, 8, 8)
        )
        self.grow = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.expand = nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body[0](x)
        for layer in self.body[1:]:
            h = h + layer(h)
        large = F.pixel_shuffle(self.expand(self.grow(h)), 2)
        size = [4 * extent for extent in x.shape[2:]]
        large = large + F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        return large, F.interpolate(large, size=x.shape[2:], mode="bicubic", align_corners=False)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


@register(images, ((4, 16), (3, 16)))
class MLPMixer(nn.Module):
    """Linear layers across tokens and across channels, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(16) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch(x).flatten(2).mT)
        return self.head(self.norm(x).mean(1))


class SpectralLayer(nn.Module):
    """Weights of complex numbers over the lowest modes."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        weight = torch.randn(width, width, modes, modes, dtype=torch.cdouble) / width
        self.weight, self.modes = nn.Parameter(weight), modes
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        m, spectrum = self.modes, torch.fft.rfft2(x.double())
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weight)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]).to(x.dtype) + self.local(x))


@register(images, ((4, 8), (3, 11)))
class FourierOperator(nn.Module):
    """Weights of complex numbers on the spectrum of an image of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 1, 1)
        self.layers = nn.ModuleList(SpectralLayer(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.project(x)


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.cdouble) / WIDTH
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@register(vectors, ((4, 1), (3, 1)))
class ComplexChain(nn.Module):
    """Complex tensors cross every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ComplexLinear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x.double(), torch.zeros_like(x).double())
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        return torch.view_as_real(z).flatten(1)


# ---- likelihoods


class Posterior(NamedTuple):
    reconstruction: Tensor
    mean: Tensor
    log_variance: Tensor


def with_noise(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, WIDTH),), {"noise": torch.randn(batch, 4)}


@register(with_noise, ((4, 1), (3, 1)))
class VariationalAutoencoder(nn.Module):
    """Takes its noise as an argument and answers with a named tuple."""

    def __init__(self, features: int = WIDTH) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 24), nn.SiLU(), nn.Linear(24, 24))
        self.mean, self.log_variance = nn.Linear(24, 4), nn.Linear(24, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.SiLU(), nn.Linear(24, features))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Posterior:
        h = F.silu(self.encoder(x))
        mean, log_variance = self.mean(h), self.log_variance(h).clamp(-5, 5)
        noise = torch.randn_like(mean) if noise is None else noise
        z = mean + noise * torch.exp(0.5 * log_variance)
        return Posterior(self.decoder(z), mean, log_variance)


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        half = WIDTH // 2
        self.net = nn.Sequential(nn.Linear(half, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fixed, moved = x.chunk(2, dim=1)[:: -1 if self.flip else 1]
        scale, shift = (0.2 * self.net(fixed)).chunk(2, dim=1)
        moved = moved * torch.exp(scale.tanh()) + shift
        pair = (moved, fixed) if self.flip else (fixed, moved)
        return torch.cat(pair, dim=1), scale.tanh().mean(1)


@register(vectors, ((4, 1), (3, 1)))
class NormalizingFlow(nn.Module):
    """A second result is summed along the way."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(k % 2 == 1) for k in range(4))
        self.register_buffer("loc", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        determinant = x.new_zeros(x.shape[0])
        for coupling in self.couplings:
            x, change = coupling(x)
            determinant = determinant + change
        prior = -0.5 * ((x - self.loc) / self.scale).square().mean(1)
        return {"z": x, "log_likelihood": prior + determinant}


class Descent(nn.Module):
    """A step down an energy: needs the gradient of a part of itself, and that one's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(x).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return x - 0.3 * slope


@register(vectors, ((4, 1), (3, 1)))
class EnergyDescent(nn.Module):
    """Blocks that ask `torch.autograd.grad` for a gradient stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.descents = linears(3), nn.ModuleList(Descent() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, descent in zip(self.layers, self.descents, strict=True):
            x = descent(layer(x).tanh())
        return x
