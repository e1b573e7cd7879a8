"""Models that are compared: chains of equal blocks, which everybody can cut in the same place."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WORDS, _CLASSES = 512, 10

Loss = Callable[[Tensor, Tensor], Tensor]


Optimize = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=1e-3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, which keeps two numbers for each weight."""
    return torch.optim.AdamW(parameters, lr=1e-4)


class Chain(L.LightningModule):
    """Blocks ``net.0``, ``net.1``, ... and a loss.

    Args:
        blocks: The blocks.
        loss: Of the last block's output and the targets, a mean over the rows.
        optimize: Makes the optimizer of some parameters.
    """

    def __init__(self, blocks: list[nn.Module], loss: Loss, optimize: Optimize) -> None:
        super().__init__()
        self.net, self._loss, self._optimize = nn.Sequential(*blocks), loss, optimize

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch of inputs and targets."""
        return self._loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for all."""
        return self._optimize(self.parameters())


@dataclass(frozen=True)
class Model:
    """How to make a model and its data.

    Attributes:
        blocks: Makes so many blocks.
        batch: Makes inputs and targets of so many rows.
        loss: Of outputs and targets.
    """

    blocks: Callable[[int], list[nn.Module]]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Loss

    def chain(self, num_blocks: int, optimize: Optimize = sgd) -> Chain:
        """The same weights each time."""
        torch.manual_seed(0)
        return Chain(self.blocks(num_blocks), self.loss, optimize)

    def batches(self, rows: int, count: int = 2) -> list[tuple[Tensor, Tensor]]:
        """The same ``count`` batches each time."""
        torch.manual_seed(1)
        return [self.batch(rows) for _ in range(count)]


def mlp(width: int = 1024) -> Model:
    """Linear layers of one width."""
    return Model(
        lambda count: [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)],
        lambda rows: (torch.randn(rows, width), torch.randn(rows, width)),
        F.mse_loss,
    )


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, width, height, width of the image]."""
        return torch.relu(x + self.body(x))


def conv(width: int = 64, pixels: int = 16) -> Model:
    """A ResNet: a stem, residual blocks of one width, pooling and a head."""

    def blocks(count: int) -> list[nn.Module]:
        made: list[nn.Module] = [Residual(width) for _ in range(count)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))
        made[0] = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), made[0])
        made[-1] = nn.Sequential(made[-1], head)
        return made

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3, pixels, pixels), torch.randint(_CLASSES, (rows,))

    return Model(blocks, batch, F.cross_entropy)


class Block(nn.Module):
    """A block of a GPT with causal attention."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, length, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Words and their places."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.word, self.place = (
            nn.Embedding(_WORDS, width),
            nn.Parameter(torch.zeros(length, width)),
        )

    def forward(self, words: Tensor) -> Tensor:
        """``words`` of shape [rows, length]."""
        return self.word(words) + self.place


def gpt(width: int = 192, length: int = 64) -> Model:
    """A GPT: an embedding, blocks, and a head."""

    def blocks(count: int) -> list[nn.Module]:
        made: list[nn.Module] = [Block(width) for _ in range(count)]
        made[0] = nn.Sequential(Embedding(width, length), made[0])
        made[-1] = nn.Sequential(made[-1], nn.LayerNorm(width), nn.Linear(width, _WORDS))
        return made

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(_WORDS, (rows, length + 1))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def loss(logits: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())

    return Model(blocks, batch, loss)


MODELS: dict[str, Callable[..., Model]] = {"mlp": mlp, "conv": conv, "gpt": gpt}


def get_model(name: str) -> Callable[..., Model]:
    """Returns what makes a model of given sizes.

    Args:
        name: A name of `MODELS`.

    Raises:
        ValueError: If there is no such model; names the nearest one.
    """
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(str(name).lower(), MODELS, n=1, cutoff=0.0)
    raise ValueError(
        f"The model must be one of {', '.join(MODELS)}, got {name!r}. The name comes from models. "
        f"Set models=[{close[0]}]."
    )


def cuts(num_blocks: int, num_stages: int) -> list[int]:
    """First block of each stage, and the number of blocks; equal counts as far as they go."""
    return [num_blocks * stage // num_stages for stage in range(num_stages + 1)]
