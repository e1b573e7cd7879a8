"""Ordinary models: convolutions, skips, attention, ties, recurrence."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.registry import (
    WIDTH,
    Arguments,
    images,
    register,
    vectors,
)


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


@register(images, ((4, 16), (3, 20)), separable=False, condition="BatchNorm")
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
        rate = self.drop.p if self.training else 0.0
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


@register(images, ((4, 16), (3, 21)), separable=False, condition="BatchNorm")
class UNet(nn.Module):
    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList(
            self.convs(i, o) for i, o in itertools.pairwise([3, *widths[:-1]])
        )
        self.middle = self.convs(widths[-2], widths[-1])
        pairs = list(itertools.pairwise(widths))[::-1]
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
