"""Models of sequences: recurrence, packing, convolutions, attention of several kinds."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.models.registry import WIDTH, Arguments, register

VOCABULARY = 31

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


@register()
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


@register(sizes=((4, 5), (3, 3)))
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


@register()
class RelativePositions(nn.Module):
    """Attention with a bias that a table gives for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RelativeAttention() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.layer_norm(layer(x), (WIDTH,))
        return x
