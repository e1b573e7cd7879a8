"""A small GPT over ASCII characters, as a LightningModule."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class LanguageModel(L.LightningModule):
    """Cross entropy of the next code, accuracy and AdamW with a cosine schedule.

    Args:
        learning_rate: Where the cosine schedule begins; it ends at zero after the last epoch.

    Attributes:
        val_accuracy: Made by the networks, which know how many codes there are.
    """

    val_accuracy: MulticlassAccuracy

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        codes, targets = batch
        loss = F.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        codes, targets = batch
        logits = self(codes).flatten(0, 1)
        self.val_accuracy(logits, targets.flatten())
        loss = F.cross_entropy(logits, targets.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        codes, targets = batch
        loss = F.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
        self.log("test_loss", loss, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[CosineAnnealingLR]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate)
        epochs = max(self.trainer.max_epochs or 1, 1)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=epochs)]


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a norm and beside a skip.

    Args:
        width: Features of a token.
        heads: Attention heads; they divide `width`.
        dropout: Drop rate of both branches.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        """Maps (batch, block, width) to the same shape; no token sees a later one."""
        batch, block, width = x.shape
        heads = self.qkv(x).view(batch, block, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, block, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, block, width) to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(LanguageModel):
    """A decoder-only transformer (Radford et al. 2019) whose embedding is also its last layer.

    Args:
        vocabulary: Codes of a character.
        block_size: Longest text it can see, in characters.
        width: Features of a token.
        depth: Transformer blocks.
        heads: Attention heads; they divide `width`.
        dropout: Drop rate of the blocks.
        learning_rate: Where the cosine schedule begins; it ends at zero after the last epoch.
    """

    def __init__(
        self,
        vocabulary: int = 128,
        block_size: int = 64,
        width: int = 128,
        depth: int = 6,
        heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.val_accuracy = MulticlassAccuracy(vocabulary, average="micro")
        # At unit variance the tied embedding would make the first logits far too large.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes (batch, block) to logits (batch, block, vocabulary) of the next code."""
        places = torch.arange(codes.shape[1], device=codes.device)
        x = self.tokens(codes) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
