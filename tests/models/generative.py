"""LightningModules whose steps do more than call a model: noise, likelihoods, weights of tokens."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.models.fields import AttentionUNet, VariationalAutoencoder
from tests.models.recurrent import Tagger

NUM_TIMES = 100


class Fitted(L.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Diffusion(Fitted):
    """Learns the noise that its step has added."""

    def __init__(self) -> None:
        super().__init__()
        self.network = AttentionUNet()
        betas = torch.linspace(1e-4, 0.1, NUM_TIMES)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.randn_like(x), torch.randint(0, NUM_TIMES, (len(x),), device=x.device)

    def step(self, batch: Any) -> Tensor:
        (x,) = batch
        noise, t = self.draw(x)
        kept = self.kept[t].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.network(noisy, t), noise)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))


class RepeatableDiffusion(Diffusion):
    """What it draws is a function of the row, and so the same in any microbatch."""

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (1e3 * x).sin(), (1e3 * x.abs().amax((1, 2, 3))).long() % NUM_TIMES


class Variational(Fitted):
    """Calls the parts of a model, between which it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.model = VariationalAutoencoder(features=6)

    def draw(self, mean: Tensor, x: Tensor) -> Tensor:
        return torch.randn_like(mean)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (x,) = batch
        h = self.model.encoder(x)
        mean, log_variance = self.model.mean(h), self.model.log_variance(h)
        z = mean + self.draw(mean, x) * torch.exp(0.5 * log_variance)
        fit = F.mse_loss(self.model.decoder(z), x, reduction="none").sum(1).mean()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        self.log_dict({"fit": fit, "divergence": divergence}, on_step=False, on_epoch=True)
        return {"loss": fit + 0.5 * divergence, "mean": mean.detach()}


class RepeatableVariational(Variational):
    def draw(self, mean: Tensor, x: Tensor) -> Tensor:
        return (1e3 * x[:, : mean.shape[1]]).sin()


class NamedEntities(Fitted):
    """Tags of tokens, of which those of the padding do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = Tagger()

    def step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens, tags = batch
        tags = tags.masked_fill(tokens == 0, -100)
        logits = self.tagger(tokens)
        count = (tags != -100).sum()
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
        return loss, count, (logits.argmax(-1) == tags).sum()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, count, _ = self.step(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=int(count))
        return {"loss": loss, "weight": count}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, _, right = self.step(batch)
        self.log("right", right.double() / batch[0].numel())


class PackedInStep(Fitted):
    """Packs and unpacks in the step itself; what it packs is as long as the rows ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(31, 12), nn.Linear(12, 12), nn.Tanh())
        self.lstm = nn.LSTM(12, 8, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 7))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, tags = batch
        lengths = (tokens != 0).sum(1).clamp_min(1).cpu()
        x = pack_padded_sequence(self.embed(tokens), lengths, True, enforce_sorted=False)
        packed: PackedSequence = self.lstm(x)[0]
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=tokens.shape[1])
        return F.cross_entropy(self.head(x).flatten(0, 1), tags.flatten())


class GradientPenalty(Fitted):
    """Asks for the gradient of the model, to train with."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x = x.clone().requires_grad_(True)
        score = self.critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1).square().mean()
