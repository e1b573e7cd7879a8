"""An encoder of long sequences with local attention, as a LightningModule."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .images import Classifier


class LocalBlock(nn.Module):
    """Attention within windows and a perceptron, each behind a norm and beside a skip.

    Args:
        width: Features of a token.
        heads: Attention heads; they divide `width`.
        window: Tokens that see each other; it divides the length of a sequence that is longer.
    """

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def attention(self, x: Tensor) -> Tensor:
        """Maps (batch, length, width) to the same shape; a token sees its window."""
        batch, length, width = x.shape
        window = min(self.window, length)
        parts = (batch, length // window, window, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(x).view(parts).permute(3, 0, 1, 4, 2, 5).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(2, 3).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, length, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LongEncoder(Classifier):
    """Classifies sequences of thousands of tokens.

    Behind each block the sequence is `shrink` times shorter, so that few windows, and at last one,
    see all of it.

    Args:
        vocabulary: Codes of a token.
        num_classes: Classes to tell apart.
        width: Features of a token.
        depth: Blocks.
        heads: Attention heads; they divide `width`.
        window: Tokens that see each other in a block.
        shrink: Neighbours that become one token behind a block; its power by `depth`, and `window`
            at every length that is larger than it, divide the length of a sequence.
        learning_rate: First learning rate of the cosine schedule.
    """

    def __init__(
        self,
        vocabulary: int = 20,
        num_classes: int = 4,
        width: int = 32,
        depth: int = 4,
        heads: int = 2,
        window: int = 64,
        shrink: int = 4,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__(num_classes, learning_rate)
        self.save_hyperparameters()
        self.shrink = shrink
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LocalBlock(width, heads, window) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes (batch, length) to logits (batch, num_classes)."""
        x = self.tokens(codes)
        for block in self.blocks:
            x = F.max_pool1d(block(x).transpose(1, 2), self.shrink).transpose(1, 2)
        return self.head(self.norm(x).amax(dim=1))
