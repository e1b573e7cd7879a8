"""LightningModules whose steps call several modules, or one of them several times."""

from __future__ import annotations

import copy
import itertools

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

WIDTH = 6


def mlp(*widths: int, norm: bool = False) -> nn.Sequential:
    """Linear layers with Tanh between them; with ``norm`` also behind the last one.

    A constant before BatchNorm has no gradient but rounding, which Adam would blow up.
    """
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=not norm)]
        layers += [*([nn.BatchNorm1d(after)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers[: None if norm else -1])


class Base(L.LightningModule):
    """Logs the loss of both loops; a subclass says what it is."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, lr=1e-2)


class LitAutoEncoder(L.LightningModule):
    """Lightning's quickstart, with smaller layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, WIDTH))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Only the encoder."""
        self.log("val_norm", self.encoder(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class NormedAutoEncoder(LitAutoEncoder):
    """With layers that see batches; dropout of 0 leaves it comparable."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(mlp(WIDTH, 8, 3, norm=True), nn.Dropout(0.0))
        self.decoder = nn.Sequential(mlp(3, 8, 8, norm=True), nn.Dropout(0.0), nn.Linear(8, WIDTH))


class VAE(Base):
    """Draws in the step, and uses what it draws in the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 8, 8), mlp(3, 8, WIDTH)
        self.mu, self.logvar = nn.Linear(8, 3), nn.Linear(8, 3)

    def loss(self, x, y):
        hidden = self.encoder(x).relu()
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(logvar)
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(z), x) + 0.1 * kl + 0.01 * z.abs().mean()


class DistributionVAE(VAE):
    """The same with distributions, whose arguments are validated."""

    def loss(self, x, y):
        hidden = self.encoder(x).relu()
        q = Normal(self.mu(hidden), F.softplus(self.logvar(hidden)) + 0.1)
        z = q.rsample()
        likelihood = Normal(self.decoder(z), 1.0).log_prob(x).sum(1)
        prior = Normal(torch.zeros_like(z), torch.ones_like(z))
        return (kl_divergence(q, prior).sum(1) - likelihood).mean()


class Siamese(Base):
    """One net on two views."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 8, 8, 4)

    def loss(self, x, y):
        first, second = self.net(x), self.net(x.flip(1))
        return F.mse_loss(first, second) + first.square().mean()


class ProjectedSiamese(Siamese):
    """With a projection behind each view, and something of the step's own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = mlp(4, 6, 3)

    def loss(self, x, y):
        views = [F.normalize(self.net(view), dim=1) for view in (x, x.flip(1))]
        first, second = map(self.projection, views)
        return (1 - F.cosine_similarity(first, second)).mean() + views[0].abs().mean()


class SimCLR(Base):
    """Compares the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projection = mlp(WIDTH, 8, 8), mlp(8, 8, 4)

    def loss(self, x, y):
        a = F.normalize(self.projection(self.backbone(x)), dim=1)
        b = F.normalize(self.projection(self.backbone(x.flip(1))), dim=1)
        return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(x)))


class BYOL(Base):
    """An online net twice, its predictor twice, a target net twice; BatchNorm in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = mlp(WIDTH, 8, 8, 4, norm=True), mlp(4, 6, 4, norm=True)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def loss(self, x, y):
        a, b = x, x.flip(1)
        predictions = [self.predictor(self.online(view)) for view in (a, b)]
        with torch.no_grad():
            targets = [self.target(view) for view in (b, a)]
        pairs = zip(predictions, targets, strict=True)
        return sum(2 - 2 * F.cosine_similarity(p, t).mean() for p, t in pairs)


class TeacherFirst(Base):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(WIDTH, 8, 8, 3), mlp(WIDTH, 10, 3)

    def loss(self, x, y):
        with torch.no_grad():
            wanted = self.teacher(x).softmax(1)
        out = self.student(x)
        return F.kl_div(out.log_softmax(1), wanted, reduction="batchmean") + F.mse_loss(out, y)


class StudentFirst(TeacherFirst):
    def loss(self, x, y):
        out = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x).softmax(1)
        return F.kl_div(out.log_softmax(1), wanted, reduction="batchmean") + F.mse_loss(out, y)


class BackboneAndHead(Base):
    """Features are in the loss, too; a metric and lists stand between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = mlp(WIDTH, 8, 8), nn.Linear(8, 3)
        self.error = torchmetrics.MeanSquaredError()
        self.scale = nn.Parameter(torch.ones(()))
        self.features: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        feat = F.dropout(self.backbone(x), 0.0, self.training)
        self.features.append(feat.detach().mean())
        self.error(feat[:, :3].clone(), y)
        self.log("error", self.error)
        out = self.head(self.scale * feat)
        self.log("mean", out.mean().item())
        return {"loss": F.mse_loss(out, y) + 1e-2 * feat.square().mean(), "out": out.detach()}

    def on_train_epoch_end(self):
        self.log("features", torch.stack(self.features).mean())
        self.features.clear()

    def loss(self, x, y):
        return F.mse_loss(self.head(self.backbone(x)), y)


class Loop(Base):
    """One block four times on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, 8), mlp(8, 8, 8), nn.Linear(8, 3)

    def loss(self, x, y):
        x = self.stem(x)
        for _ in range(4):
            x = x + 0.5 * self.block(x)
        return F.mse_loss(self.head(x), y)


class Mixup(Base):
    """Mixes samples by numbers from NumPy and a permutation from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = mlp(WIDTH, 8, 8), nn.Linear(8, 3)

    def loss(self, x, y):
        if not self.training:
            return F.mse_loss(self.head(self.backbone(x)), y)
        share = float(np.random.beta(0.4, 0.4))
        other = torch.randperm(len(x))
        feat = self.backbone(share * x + (1 - share) * x[other])
        hidden = share * feat + (1 - share) * feat[other]
        out = self.head(hidden)
        return share * F.mse_loss(out, y) + (1 - share) * F.mse_loss(out, y[other])


class WritesAnswer(Base):
    """In place on what a call returned, and on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(WIDTH, 8, 8), mlp(8, 8, 3)

    def loss(self, x, y):
        x.mul_(0.5)
        hidden = self.first(x)
        hidden.add_(1.0)
        hidden[:, 0] = x[:, 0]
        hidden += 0.1
        return F.mse_loss(self.second(hidden), y)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = mlp(WIDTH, 8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, *, x: Tensor, offset: int, mask: Tensor | None = None) -> dict:
        hidden = self.body(x) + offset
        hidden = hidden if mask is None else hidden * mask
        return {"left": self.left(hidden), "right": self.right(hidden), "mask": mask, "n": 2}


class Structured(Base):
    """Keyword arguments; outputs with None and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = TwoHeads(), nn.Linear(3, 3)

    def loss(self, x, y):
        out = self.net(x=x, offset=1)
        assert out["mask"] is None and out["n"] == 2
        self.log("left", out["left"].mean())
        again = self.net(x=x, offset=1, mask=x[:, :1])
        return F.mse_loss(self.head(out["left"]) / out["n"], y) + again["right"].square().mean()


class Counting(Base):
    """A counter and a list between the calls, an attribute over them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = mlp(WIDTH, 8), mlp(8, 8, 8), mlp(8, 8, 3)
        self.calls, self.means = 0, []

    def loss(self, x, y):
        self.weight = x.abs().mean(1, keepdim=True)
        hidden = self.first(x)
        self.calls += 1
        hidden = self.second(hidden / self.calls)
        self.means.append(hidden.detach().mean())
        self.calls += 1
        out = self.third(hidden * self.weight + self.calls)
        return (self.weight * (out - y).square()).mean() * self.calls

    def on_train_epoch_end(self):
        self.log("calls", float(self.calls))
        self.log("means", torch.stack(self.means).mean())
        self.means.clear()


class Queue(Base):
    """MoCo's dictionary: what the step writes behind its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(WIDTH, 8, 8, 4), mlp(WIDTH, 8, 8, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.linspace(-1, 1, 4 * 24).view(4, 24), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def loss(self, x, y):
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.key(x.flip(1)), dim=1)
        positive = (query * keys).sum(1, keepdim=True)
        negative = query @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], 1) / 0.2
        if self.training:
            self.enqueue(keys)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        pointer = int(self.pointer)
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.pointer[0] = (pointer + len(keys)) % self.queue.shape[1]


class Backwards(LitAutoEncoder):
    """Its validation runs the decoder before the encoder."""

    def validation_step(self, batch, batch_idx):
        again = self.encoder(self.decoder(batch[1]))
        self.log("val_cycle", F.mse_loss(again, batch[1]))


class ContraryOrders(Base):
    """Independent in training; in validation the second comes before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(WIDTH, 8, 8, 3), mlp(WIDTH, 8, 8, WIDTH)

    def loss(self, x, y):
        return F.mse_loss(self.first(x), y) + F.mse_loss(self.second(x), x.flip(1))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.first(self.second(x)), y))
