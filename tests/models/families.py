"""Families of models beside chains and transformers: what is between their modules differs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.models.registry import WIDTH, Arguments, images, linears, register, sequences, vectors

VOCABULARY = 31

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


@register(images, ((4, 8), (3, 9)), thorough=False)
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


@register(images, ((4, 16), (3, 16)), thorough=False)
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


@register(vectors, ((4, 1), (3, 1)), thorough=False)
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


@register(with_noise, ((4, 1), (3, 1)), thorough=False)
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


@register(vectors, ((4, 1), (3, 1)), thorough=False)
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


# ---- sequences and recurrence


def token_rows(batch: int, length: int) -> Arguments:
    return (torch.randint(0, VOCABULARY, (batch, length)),), {}


def tokens_with_lengths(batch: int, length: int) -> Arguments:
    lengths = torch.randint(1, length + 1, (batch,))
    lengths[0] = length
    return (torch.randint(0, VOCABULARY, (batch, length)), lengths), {}


@register(token_rows)
class Tagger(nn.Module):
    """Embeddings, bidirectional LSTMs, and a head for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        lstms = (nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True) for _ in range(4))
        self.lstms = nn.ModuleList(lstms)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for lstm in self.lstms:
            x = x + lstm(x)[0]
        return self.head(self.mix(x))


class PackedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]


@register(tokens_with_lengths)
class PackedTagger(nn.Module):
    """Packed sequences within modules, which therefore stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoders = nn.ModuleList(PackedEncoder() for _ in range(2))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(tokens)
        for encoder in self.encoders:
            x = encoder(x, lengths)
        return self.head(x)


@register(thorough=False)
class GatedRecurrence(nn.Module):
    """Learned first states, and the last state as the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 1, WIDTH))
        layers = (nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first.expand(-1, x.shape[0], -1).contiguous()
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(torch.cat([x[:, -1], state[-1]], 0).view(2, x.shape[0], -1).mean(0))


@register(sizes=((4, 5), (3, 3)), thorough=False)
class CellOverTime(nn.Module):
    """A loop in Python over the time steps, with one cell after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.second = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = x.new_zeros(x.shape[0], WIDTH)
        outs = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            g = self.second(h, g)
            outs.append(g)
        return self.head(torch.stack(outs, dim=1))


class CausalBlock(nn.Module):
    def __init__(self, inner: int, outer: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        conv = nn.Conv1d(inner, outer, 3, padding=self.pad, dilation=dilation)
        self.conv1 = nn.utils.parametrizations.weight_norm(conv)
        conv = nn.Conv1d(outer, outer, 3, padding=self.pad, dilation=dilation)
        self.conv2 = nn.utils.weight_norm(conv)  # the older one, by hooks
        self.conv2.weight = self.conv2.weight.detach()  # what its hook makes anew in every call
        self.skip = nn.Conv1d(inner, outer, 1) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)[:, :, : -self.pad].relu()
        h = self.conv2(h)[..., : -self.pad].contiguous().relu_()
        return (h + (x if self.skip is None else self.skip(x))).relu()


@register()
class TemporalConvolutions(nn.Module):
    """Dilated convolutions with both kinds of `weight_norm`."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, 12, 12, 12]
        self.blocks = nn.ModuleList(
            CausalBlock(a, b, 2**k) for k, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mT)


# ---- attention of other kinds


def translation(batch: int, length: int) -> Arguments:
    source = torch.randint(1, VOCABULARY, (batch, length))
    target = torch.randint(1, VOCABULARY, (batch, length - 1))
    source[:, -1] = target[::2, -1] = 0
    return (source, target), {}


@register(translation)
class Translator(nn.Module):
    """Masks of several kinds, computed in the forward, go to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.target = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        angles = torch.arange(32)[:, None] / 10 ** torch.arange(WIDTH)[None]
        self.register_buffer("positions", angles.sin())

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.positions.dtype)
        paddings = [
            torch.zeros(ids.shape, dtype=mask.dtype).masked_fill_(ids == 0, -torch.inf)
            for ids in (source, target)
        ]
        out = self.transformer(
            self.source(source) + self.positions[: source.shape[1]],
            self.target(target) * WIDTH**0.5 + self.positions[:length],
            tgt_mask=mask,
            src_key_padding_mask=paddings[0],
            tgt_key_padding_mask=paddings[1],
            memory_key_padding_mask=paddings[0],
        )
        return self.head(out)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU())
        self.out = nn.Linear(24, WIDTH)

    def forward(self, latent: Tensor, context: Tensor | None = None) -> Tensor:
        query = self.norm(latent)
        context = query if context is None else context
        latent = latent + self.attention(query, context, context, need_weights=False)[0]
        return latent + self.out(self.mlp(latent))


@register()
class Perceiver(nn.Module):
    """A learned array asks the input again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(3, WIDTH))
        self.cross = CrossAttention()  # one for all rounds
        self.own = nn.ModuleList(CrossAttention() for _ in range(3))
        self.query, self.decode = nn.Parameter(torch.randn(1, 1, WIDTH)), CrossAttention()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent.unsqueeze(0).repeat(x.shape[0], 1, 1)
        for layer in self.own:
            latent = layer(self.cross(latent, x))
        return self.head(self.decode(self.query.expand(x.shape[0], -1, -1), latent).squeeze(1))


class RelativeAttention(nn.Module):
    def __init__(self, longest: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.heads, self.table = heads, nn.Parameter(torch.randn(2 * longest - 1, heads))
        place = torch.arange(longest)
        self.register_buffer("index", place[:, None] - place[None] + longest - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index[:t, :t].reshape(-1)].view(t, t, self.heads).permute(2, 0, 1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))


@register(thorough=False)
class RelativePositions(nn.Module):
    """Attention with a bias that a table gives for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RelativeAttention() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.layer_norm(layer(x), (WIDTH,))
        return x


# ---- indices: graphs, tables, experts


def graphs(batch: int, nodes: int) -> Arguments:
    edges = torch.randint(0, nodes, (batch, 2 * nodes, 2))
    return (torch.randn(batch, nodes, WIDTH), edges), {"mask": torch.rand(batch, 2 * nodes) > 0.2}


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        messages = self.message(torch.cat([x[source], x.index_select(0, target)], dim=-1))
        messages = messages * mask.unsqueeze(-1)
        total = torch.zeros_like(x).index_add_(0, target, messages)
        count = x.new_zeros(x.shape[0]).scatter_add_(0, target, mask.to(x.dtype))
        return self.update(total / count.clamp_min(1).unsqueeze(-1), x)


@register(graphs, ((4, 6), (3, 5)))
class GraphNetwork(nn.Module):
    """Graphs of a batch as one, nodes addressed by index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MessagePassing() for _ in range(3))
        self.edge = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, edges: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        b, n, w = x.shape
        offsets = torch.arange(b, device=x.device)[:, None] * n
        source, target = ((edges[..., k] + offsets).flatten() for k in (0, 1))
        x, flat = x.reshape(b * n, w), mask.flatten()
        for layer in self.layers:
            x = layer(x, source, target, flat)
        nodes = x.view(b, n, w)
        ends = torch.gather(nodes, 1, edges[..., :1].expand(-1, -1, w))
        return self.head(nodes.amax(1)), self.edge(ends).squeeze(-1).masked_fill(~mask, 0.0)


def clicks(batch: int, length: int) -> Arguments:
    bags = torch.randint(0, 50, (batch, 3, length))
    return (torch.randn(batch, WIDTH), bags, torch.randint(0, 20, (batch, 2))), {}


@register(clicks, thorough=False)
class Recommender(nn.Module):
    """Large tables, small networks, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.tables = nn.ModuleDict({name: nn.Embedding(20, 8) for name in ("user", "item")})
        pairs = torch.tril_indices(6, 6, offset=-1)
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])
        self.top = nn.Sequential(nn.Linear(8 + 15, 12), nn.ReLU(), nn.Linear(12, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, bags: Tensor, ids: Tensor) -> Tensor:
        batch, _, length = bags.shape
        features = [self.bottom(dense)]
        offsets = torch.arange(0, batch * length, length, device=bags.device)
        for bag, numbers in zip(self.bags, bags.unbind(1), strict=True):
            features.append(bag(numbers.flatten(), offsets))
        features += [table(ids[:, k]) for k, table in enumerate(self.tables.values())]
        stacked = torch.stack(features, dim=1)
        products = torch.bmm(stacked, stacked.mT)[:, self.rows, self.columns]
        return self.top(torch.cat([features[0], products], dim=1)).squeeze(1)


class StackedExperts(nn.Module):
    """Each token goes through its two best experts, whose weights are one tensor."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.w1 = nn.Parameter(torch.randn(count, WIDTH, 24) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(count, 24, WIDTH) / 24**0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        weights = torch.zeros(*x.shape[:-1], len(self.w1), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, share)
        hidden = torch.einsum("btw,ewh->ebth", x, self.w1).relu()
        return x + torch.einsum("ebth,ehw,bte->btw", hidden, self.w2, weights)


@register(thorough=False)
class MixtureOfExperts(nn.Module):
    """Experts whose weights are one tensor, two of them for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StackedExperts() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x


# ---- one module in several roles


@register(
    lambda b, t: ((torch.randn(b, WIDTH), torch.randn(b, WIDTH)), {}),
    ((4, 1), (3, 1)),
    thorough=False,
)
class SiameseEncoder(nn.Module):
    """One encoder called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in linears(4)))
        self.head = nn.Bilinear(WIDTH, WIDTH, 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.encoder(left), self.encoder(right)
        return self.head(a, b), F.cosine_similarity(a, b)


@register(vectors, ((4, 1), (3, 1)))
class NeuralODE(nn.Module):
    """A solver of fourth order that calls one network all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.encode, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def slope(self, t: float, x: Tensor) -> Tensor:
        return self.field(F.pad(x, (0, 1), value=t))

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.encode(x), 0.5
        for t in (0.0, 0.5):
            k1 = self.slope(t, x)
            k2 = self.slope(t + h / 2, x + h / 2 * k1)
            k3 = self.slope(t + h / 2, x + h / 2 * k2)
            k4 = self.slope(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(x)


@register(vectors, ((4, 1), (3, 1)), thorough=False)
class HyperNetwork(nn.Module):
    """Weights of one network are the output of another."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH * WIDTH))
        self.codes = nn.ParameterDict({name: torch.randn(4) for name in ("first", "second")})
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)])
        self.between, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for code, bias in zip(self.codes.values(), self.biases, strict=True):
            weight = self.make(code).view(WIDTH, WIDTH) / WIDTH
            x = self.between(F.linear(x, weight, bias).tanh())
        return self.head(x)


def task(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {"task": "left" if length > 6 else "right"}


@register(task, thorough=False)
class Dispatch(nn.Module):
    """Modules in dicts of dicts, chosen by a string."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in linears(3)))
        self.heads = nn.ModuleDict(
            {
                name: nn.ModuleDict({"body": nn.Linear(WIDTH, WIDTH), "out": nn.Linear(WIDTH, k)})
                for name, k in (("left", 3), ("right", 5))
            }
        )

    def forward(self, x: Tensor, task: str) -> dict[str, Any]:
        head = self.heads[task]
        return {"task": task, "out": head["out"](head["body"](self.trunk(x)).relu())}


@dataclass
class Answer:
    hidden: Tensor
    scores: list[Tensor]
    count: int = 0
    extra: Tensor | None = None


class AnswerBlock(nn.Module):
    """Takes and gives an object of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, state: Answer) -> Answer:
        hidden = self.layer(state.hidden).tanh()
        return Answer(hidden, [*state.scores, self.score(hidden)], state.count + 1)


@register(sequences)
class Dataclasses(nn.Module):
    """Modules that take and give dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AnswerBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Answer:
        state = Answer(x, [])
        for block in self.blocks:
            state = block(state)
        return state
