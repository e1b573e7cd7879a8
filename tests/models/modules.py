"""LightningModules as users write them."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


class ResidualCNN(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(x.mean(dim=(2, 3)))


class ImageClassifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ResidualCNN()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", (logits.argmax(-1) == y).float().mean(), on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # A bias of the keys has no gradient but rounding, which Adam would blow up.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (
            t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for t in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, dim))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(L.LightningModule):
    """A small GPT whose embedding and head are one weight."""

    def __init__(self, vocabulary: int = 17, dim: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(32, dim) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(dim, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def step(self, batch):
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "length": batch[0].shape[1]}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Perceptron(L.LightningModule):
    def __init__(self, width: int = 12, depth: int = 8) -> None:
        super().__init__()
        layers = [nn.Linear(6, width), nn.Tanh()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.scale * self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.scale * self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class BatchNormCNN(ImageClassifier):
    """With running statistics, which see microbatches."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [nn.Conv2d(1 if i == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6)]
            layers += [nn.ReLU(inplace=True)]
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))


class FrozenPrefix(Perceptron):
    """Fine-tuning: the first layers take no gradient."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[:8].parameters():
            parameter.requires_grad = False

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class TwoTowers(L.LightningModule):
    """The second input enters in the middle; its embedding meets the first only at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.right = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        right = self.right(x.flip(1))
        return self.head(left * right)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Autoencoder(L.LightningModule):
    """Two calls of modules with weights, as in Lightning's own first example."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 6))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        z = self.encoder(x.view(x.size(0), -1))
        loss = F.mse_loss(self.decoder(z), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Siamese(L.LightningModule):
    """One network called on two views."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        )

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.net(x), self.net(x.flip(1))
        loss = F.mse_loss(first, second) + first.square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class OneLinear(L.LightningModule):
    """What people try first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WeightedLoss(Perceptron):
    """A loss module with a buffer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.3, 0.5]))
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), y.softmax(-1))


class LogsInForward(Perceptron):
    """Its own forward logs and counts, so it has to run as it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        self.log("mean", y.mean())
        return y

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)


class TrainingOnlyHead(Perceptron):
    """Validation does not see all that training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = F.mse_loss(self.scale * out, y) + self.gain * self.auxiliary(out).square().mean()
        self.log("train_loss", loss)
        return loss


class ValueDependentLoss(Perceptron):
    """A loss module with a buffer that reads values, so that it cannot be recorded."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            if (y > 1e9).any():
                raise ValueError("the target is out of range")
            return (self.weight * (out - y).square()).mean()

    def __init__(self) -> None:
        super().__init__()
        self.loss = self.Loss()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), y)


class NamedTwice(Perceptron):
    """The step calls a container whose layers are known by other names as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 6)])
        self.net = nn.Sequential(*self.layers, *self.net)

    def train(self, mode=True):
        super().train(mode)
        self.layers[1].eval()
        return self
