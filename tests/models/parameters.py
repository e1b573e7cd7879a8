"""Small models whose parameters have a story: shared, frozen, used by the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

WIDTH, TOKENS = 6, 11
Make = Callable[[], L.LightningModule]
TIED: dict[str, Make] = {}
FROZEN: dict[str, Make] = {}


def case(table: dict[str, Make], name: str) -> Callable[[Any], Any]:
    """Puts a class or function that makes a LightningModule into a table."""

    def add(make: Any) -> Any:
        table[name] = make
        return make

    return add


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(
        *(layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )


class Regression(L.LightningModule):
    """Six linear layers from six numbers to three."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*linears(5), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def ids_of(x: Tensor) -> Tensor:
    """Tokens [rows, 6] made from numbers."""
    return (x * 100).long().remainder(TOKENS)


class Words(Regression):
    """Tokens to the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linears(4)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(self.embed(ids_of(x))))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), ids_of(x.flip(1)).flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", self(x).square().mean())


# ---- one tensor in several places


@case(TIED, "embedding and head")
class TiedHead(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@case(TIED, "three places, one of them transposed")
class TiedThrice(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[:4](self.embed(ids_of(x)))
        x = self.middle(F.linear(x, self.embed.weight).tanh())
        x = F.linear(self.net[4:](x) @ self.embed.weight.t(), self.embed.weight.t())
        return self.head(x)


@case(TIED, "the head is an operation in the step")
class TiedInStep(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.net(self.embed(ids_of(x))), self.embed.weight)


@case(TIED, "inside submodules that run first and last")
class TiedInside(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[8].weight = self.net[0].weight
        self.net[6].bias = self.net[0].bias


@case(TIED, "one module at two names")
class ModuleAtTwoNames(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[8] = self.net[0]
        self.alias = self.net[4]


@case(TIED, "one parameter at two names of a module")
class ParameterAtTwoNames(Regression):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.full((WIDTH,), 0.5))
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.first).tanh() * self.second

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Twice(), *self.net, nn.Linear(3, 3))


@case(TIED, "a buffer that two modules have")
class TiedBuffer(Regression):
    class Positions(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    def __init__(self) -> None:
        super().__init__()
        table = torch.linspace(-1, 1, WIDTH)
        places = [self.Positions(table), self.Positions(table)]
        self.net = nn.Sequential(places[0], *self.net[:-1], places[1], self.net[-1])


@case(TIED, "a parametrization with state that two layers share")
class TiedParametrization(Regression):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.scale

    def __init__(self) -> None:
        super().__init__()
        scaled = self.Scaled()
        for index in (0, 8):
            parametrize.register_parametrization(self.net[index], "weight", scaled)


@case(TIED, "a frozen tie")
class TiedFrozen(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)


# ---- what is not trained


def frozen(*frozen: str) -> Callable[[], Regression]:
    """A model in which the parameters that begin with these names are frozen."""

    def make() -> Regression:
        model = Regression()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return model

    return make


FROZEN["the first layers"] = frozen("net.0", "net.2", "net.4", "net.6")
FROZEN["the middle"] = frozen("net.2", "net.4", "net.6", "net.8")
FROZEN["the last layers"] = frozen("net.6", "net.8", "net.10")
FROZEN["all but one bias"] = frozen("net.0", "net.2", "net.4.weight", "net.6", "net.8", "net.1")


@case(FROZEN, "thawed at an epoch")
class Thawed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[:8].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[4:8].requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@case(FROZEN, "frozen at an epoch")
class FrozenLater(Regression):
    def on_train_epoch_start(self) -> None:
        self.net[:8].requires_grad_(self.current_epoch != 1)


@case(FROZEN, "thawed into a group of the optimizer")
class ThawedIntoGroup(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[:8].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[:8].requires_grad_(True)
            group = {"params": list(self.net[:8].parameters()), "lr": 1e-3}
            self.optimizers().optimizer.add_param_group(group)


@case(FROZEN, "used by the step before and after the call")
class OutsideTheCall(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x * self.scale) / self.temperature, y)


@case(FROZEN, "used by nothing")
class Unused(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = linears(1)
        self.net[4].extra = nn.Parameter(torch.ones(2))
        self.register_parameter("nothing", None)


@case(FROZEN, "in a list that torch does not see")
class PlainList(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[1](self.net(self.hidden[0](x)))


@case(FROZEN, "groups of which some are elsewhere")
class Groups(Regression):
    def configure_optimizers(self):
        rates = (1e-2, 1e-3, 1e-3, 5e-3, 1e-2, 2e-2)
        groups = [
            {"params": self.net[2 * k].parameters(), "lr": rate, "weight_decay": 0.1 * k}
            for k, rate in enumerate(rates)
        ]
        optimizer = torch.optim.AdamW(groups)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, list(rates), total_steps=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
