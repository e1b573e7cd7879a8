"""A diffusion model that draws the digit it is asked for, as a LightningModule."""

from __future__ import annotations

import math

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and a perceptron whose norms and skips a condition scales and shifts.

    Args:
        width: Features of a token and of the condition.
        heads: Attention heads; they divide `width`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)
        # A block begins as its skips alone.
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Maps tokens (batch, tokens, width) and (batch, width) to tokens of the same shape."""
        modulation = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Denoiser(nn.Module):
    """A transformer that tells the noise in an image (Peebles and Xie 2023, "DiT").

    Args:
        num_classes: Classes that can be asked for.
        num_steps: Noise levels.
        image_size: Pixels along one side of an image of one channel.
        patch_size: Pixels along one side of a patch; it divides `image_size`.
        width: Features of a token.
        depth: Transformer blocks.
        heads: Attention heads; they divide `width`.
    """

    def __init__(
        self,
        num_classes: int,
        num_steps: int,
        image_size: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patches = nn.Conv2d(1, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(0.1 * torch.randn(1, (image_size // patch_size) ** 2, width))
        self.levels = nn.Embedding(num_steps, width)
        self.classes = nn.Embedding(num_classes, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, patch_size**2)

    def forward(self, images: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """Maps noisy images (batch, 1, size, size), levels and labels (batch,) to their noise."""
        condition = F.silu(self.levels(levels) + self.classes(labels))
        x = self.patches(images)
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        pixels = self.head(self.norm(x)).transpose(1, 2).unflatten(2, (height, width))
        return F.pixel_shuffle(pixels, self.patch_size)


class Diffusion(L.LightningModule):
    """Denoising diffusion (Ho et al. 2020) with the noise levels of Nichol and Dhariwal (2021).

    Training draws a noise level and noise for each image; prediction draws an image for each
    label of a batch, from noise alone.

    Args:
        num_classes: Classes that can be asked for.
        num_steps: Noise levels, and calls of the network to draw an image.
        image_size: Pixels along one side of an image of one channel with values in [0, 1].
        patch_size: Pixels along one side of a patch; it divides `image_size`.
        width: Features of a token.
        depth: Transformer blocks.
        heads: Attention heads; they divide `width`.
        learning_rate: Learning rate of AdamW.
    """

    signal: Tensor

    def __init__(
        self,
        num_classes: int = 10,
        num_steps: int = 50,
        image_size: int = 8,
        patch_size: int = 2,
        width: int = 64,
        depth: int = 6,
        heads: int = 4,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = Denoiser(num_classes, num_steps, image_size, patch_size, width, depth, heads)
        times = (torch.arange(num_steps) + 1) / num_steps
        # The share of the image in what is left of it at each level, as a variance.
        signal = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
        self.register_buffer("signal", signal.clamp(min=1e-4), persistent=False)

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of the noise that the network sees in noisy images."""
        images, labels = batch
        images = 2 * images - 1
        levels = torch.randint(len(self.signal), labels.shape, device=labels.device)
        noise = torch.randn_like(images)
        signal = self.signal[levels, None, None, None]
        noisy = signal.sqrt() * images + (1 - signal).sqrt() * noise
        return F.mse_loss(self.network(noisy, levels, labels), noise)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Draws an image (1, size, size) in [0, 1] for each label."""
        labels = batch[1]
        images = torch.randn_like(batch[0])
        for level in reversed(range(len(self.signal))):
            levels = torch.full_like(labels, level)
            images = self.less_noisy(images, self.network(images, levels, labels), level)
        return images / 2 + 0.5

    def less_noisy(self, images: Tensor, noise: Tensor, level: int) -> Tensor:
        """Takes images from a level to the one below, given the noise that is seen in them."""
        signal = self.signal[level]
        clean = ((images - (1 - signal).sqrt() * noise) / signal.sqrt()).clamp(-1, 1)
        if level == 0:
            return clean
        below = self.signal[level - 1]
        kept = signal / below
        mean = below.sqrt() * (1 - kept) * clean + kept.sqrt() * (1 - below) * images
        spread = ((1 - below) / (1 - signal) * (1 - kept)).sqrt()
        return mean / (1 - signal) + spread * torch.randn_like(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
