"""Two image classifiers, a residual network and a vision transformer, as LightningModules."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Classifier(L.LightningModule):
    """Cross entropy, accuracy and AdamW with a cosine schedule, for the networks below.

    Args:
        num_classes: Classes to tell apart.
        learning_rate: Where the cosine schedule begins; it ends at zero after the last epoch.
    """

    def __init__(self, num_classes: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_accuracy(logits, labels)
        self.log("test_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("test_acc", self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[CosineAnnealingLR]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        epochs = max(self.trainer.max_epochs or 1, 1)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=epochs)]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization, and a skip around them.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Factor by which the image shrinks.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(Classifier):
    """A residual network (He et al. 2016, "Deep Residual Learning for Image Recognition").

    Args:
        in_channels: Channels of an image.
        num_classes: Classes to tell apart.
        widths: Channels of each group of blocks; a group after the first halves the image.
        blocks: Residual blocks in each group.
        learning_rate: First learning rate of the cosine schedule.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        widths: tuple[int, ...] = (16, 32, 64),
        blocks: int = 2,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__(num_classes, learning_rate)
        self.save_hyperparameters()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
        )
        layers: list[nn.Module] = []
        channels = widths[0]
        for group, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if group > 0 and block == 0 else 1
                layers.append(ResidualBlock(channels, width, stride))
                channels = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, in_channels, h, w) to logits (batch, num_classes)."""
        x = self.layers(self.stem(images))
        return self.head(x.mean(dim=(2, 3)))


class ViT(Classifier):
    """A vision transformer (Dosovitskiy et al. 2021, "An Image Is Worth 16x16 Words").

    Its tokens are averaged instead of read from a class token, which learns faster on small data
    (Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k").

    Args:
        in_channels: Channels of an image.
        num_classes: Classes to tell apart.
        image_size: Pixels along one side of an image.
        patch_size: Pixels along one side of a patch; it divides `image_size`.
        width: Features of a token.
        depth: Transformer layers.
        heads: Attention heads; they divide `width`.
        dropout: Drop rate inside the layers.
        learning_rate: First learning rate of the cosine schedule.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 8,
        patch_size: int = 2,
        width: int = 64,
        depth: int = 6,
        heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__(num_classes, learning_rate)
        self.save_hyperparameters()
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        tokens = (image_size // patch_size) ** 2
        self.positions = nn.Parameter(torch.randn(1, tokens, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, in_channels, size, size) to logits (batch, num_classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))
