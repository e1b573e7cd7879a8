"""A U-Net that finds shapes in large noisy images, as a LightningModule."""

from __future__ import annotations

import itertools

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics.classification import MulticlassJaccardIndex

Batch = tuple[Tensor, Tensor]


class ConvBlock(nn.Sequential):
    """Two 3x3 convolutions, each with a group normalization and a ReLU.

    Group normalization, because large images leave room for few in a batch.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out, a multiple of 4.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
            layers += [nn.GroupNorm(4, outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(L.LightningModule):
    """A network with skips across all its depth (Ronneberger et al. 2015, "U-Net").

    Args:
        in_channels: Channels of an image.
        num_classes: Classes of a pixel, the background is one of them.
        widths: Channels at each resolution, multiples of 4; each is half as fine as the one before.
        learning_rate: Where the cosine schedule begins; it ends at zero after the last epoch.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 3,
        widths: tuple[int, ...] = (8, 16, 32, 64),
        learning_rate: float = 5e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        pairs = list(itertools.pairwise(widths))
        self.stem = ConvBlock(in_channels, widths[0])
        self.down = nn.ModuleList(ConvBlock(fine, coarse) for fine, coarse in pairs)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in reversed(pairs)
        )
        self.up = nn.ModuleList(ConvBlock(2 * fine, fine) for fine, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], num_classes, 1)
        self.val_iou = MulticlassJaccardIndex(num_classes)
        self.test_iou = MulticlassJaccardIndex(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, in_channels, h, w) to logits (batch, num_classes, h, w).

        Height and width are multiples of 2 to the number of widths less one.
        """
        x = self.stem(images)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(F.max_pool2d(x, 2))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, masks = batch
        loss = F.cross_entropy(self(images), masks)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, masks = batch
        logits = self(images)
        self.val_iou(logits, masks)
        self.log("val_loss", F.cross_entropy(logits, masks), prog_bar=True, sync_dist=True)
        self.log("val_iou", self.val_iou, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, masks = batch
        self.test_iou(self(images), masks)
        self.log("test_iou", self.test_iou)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[CosineAnnealingLR]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        epochs = max(self.trainer.max_epochs or 1, 1)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=epochs)]
