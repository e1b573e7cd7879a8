"""LightningModules put together from names: blocks, a way to step, an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models.blocks import WIDTH, Net

TARGETS = 3

Loss = Callable[["Drawn", Tensor, Tensor], Any]
STEPS: dict[str, Loss] = {}
"""What a training step returns."""


def step(name: str) -> Callable[[Loss], Loss]:
    def add(function: Loss) -> Loss:
        STEPS[name] = function
        return function

    return add


@step("forward")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(self(x), y)


@step("net and head")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    hidden = self.net(x)
    return F.mse_loss(self.head(hidden.mean(1) * self.scale), y) + 0.01 * hidden.square().mean()


@step("two views")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    first, second = self(x), self(x.flip(-1))
    return F.mse_loss(first, y) + F.mse_loss(first, second)


@step("dict")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    out = self(x)
    return {"loss": F.mse_loss(out, y), "out": out.detach(), "length": x.shape[1]}


@step("weight")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    counts = (y[:, :1] > 0).to(y) + 0.5
    loss = (counts * (self(x) - y).square()).sum() / (TARGETS * counts.sum())
    return {"loss": loss, "weight": counts.sum()}


@step("teacher")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        wanted = self.teacher(x).mean(1)[:, :TARGETS]
    return F.mse_loss(self(x), wanted)


@step("own code")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    x = (x - x.mean(-1, keepdim=True)) * (1 + 0.1 * self.global_step)
    out = self(x)
    out = out if self.current_epoch == 0 else out * 0.5
    parts = {"fit": F.mse_loss(out, y), "size": 0.01 * out.abs().mean()}
    for name, value in parts.items():
        self.log(f"part/{name}", value)
    return sum(parts.values()) * self.scale.square()


@step("lengths")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(self(x), y)


@step("samples weighed")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    weights = x.abs().mean((1, 2))
    return (weights * F.l1_loss(self(x), y, reduction="none").mean(1)).mean()


@step("two nets")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    hidden = self.net(x)
    again = self.other(hidden) + self.other(x)
    return F.mse_loss(self.head(again.mean(1)), y) + 0.1 * (hidden - again).square().mean()


@step("penalty")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    weights = [*self.head.parameters(), *self.net.blocks[0].parameters()]
    return F.mse_loss(self(x), y) + 0.01 * sum(weight.square().sum() for weight in weights)


@step("twice, once without gradient")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        self.log("before", self(x).mean())
    return F.mse_loss(self(x), y)


@step("collects")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    out = self(x)
    self.collected.append(out.detach().abs().mean())
    self.count += 1
    return F.mse_loss(out * (1 + 0.01 * self.count), y)


@step("writes to the batch")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    x.mul_(0.5)
    out = self(x)
    y += 0.1
    return F.huber_loss(out, y)


@step("manual")
def _(self: Drawn, x: Tensor, y: Tensor) -> Any:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(F.mse_loss(self(x), y))
    optimizer.step()


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    decay = [p for p in trained if p.ndim > 1]
    rest = [p for p in trained if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


# With a large eps: a gradient that is nothing but rounding stays as small.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9),
    "Nesterov": lambda m: torch.optim.SGD(
        m.parameters(), 0.03, momentum=0.5, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda m: torch.optim.Adam(_trained(m), 1e-2, eps=1e-3),
    "AdamW": lambda m: torch.optim.AdamW(_groups(m), 1e-2, eps=1e-3),
    "AMSGrad": lambda m: torch.optim.Adam(m.parameters(), 1e-2, eps=1e-3, amsgrad=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 1e-2, eps=1e-2, momentum=0.5),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.05, eps=1e-3),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), 1e-2, eps=1e-3),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=2),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], dict[str, Any]]] = {
    "none": lambda o: {},
    "step": lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5)},
    "cosine": lambda o: {
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        "interval": "step",
    },
    "cycle": lambda o: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(
            o, 0.05, total_steps=50, cycle_momentum=False
        ),
        "interval": "step",
    },
    "plateau": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0),
        "monitor": "train",
    },
}
LOGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True, "prog_bar": True},
    "synced": {"on_epoch": True, "sync_dist": True},
    "largest": {"on_step": False, "on_epoch": True, "reduce_fx": "max"},
}


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": lambda batch: batch,
    "dict": lambda batch: {"x": batch[0], "y": batch[1], "name": "drawn"},
    "nested": lambda batch: ([batch[0]], {"target": (batch[1], None)}),
    "parts": lambda batch: [*batch[0].split(WIDTH // 2, -1), batch[1]],
}
"""What a batch looks like."""


def tensors(batch: Any) -> list[Tensor]:
    """Those of a batch in any form."""
    found = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [torch.cat(found[:-1], -1), found[-1]]


class Drawn(L.LightningModule):
    """A net, a head, and the way that they are trained.

    Args:
        blocks: Names in `BLOCKS`.
        frozen: Places of blocks that take no gradient.
        step: A name in `STEPS`.
        optimizer: A name in `OPTIMIZERS`.
        scheduler: A name in `SCHEDULERS`.
        log: A name in `LOGS`.
        form: A name in `FORMS`.
        thaws: Whether the second epoch begins with frozen blocks taking gradients.
    """

    def __init__(
        self,
        blocks: Sequence[str],
        frozen: Sequence[int],
        step: str,
        optimizer: str,
        scheduler: str,
        log: str,
        form: str,
        thaws: bool,
    ) -> None:
        super().__init__()
        self.net, self.head = Net(blocks, frozen), nn.Linear(WIDTH, TARGETS)
        self.scale = nn.Parameter(torch.ones(()))
        self.error = torchmetrics.MeanSquaredError()
        self.moved, self.form, self.thaws = 0, form, thaws
        self.kind, self.names = step, (optimizer, scheduler, log)
        if step == "teacher":
            self.teacher = copy.deepcopy(nn.Sequential(self.net)).requires_grad_(False)
        if step == "two nets":
            self.other = Net(tuple(reversed(blocks)))
        self.collected: list[Tensor] = []
        self.count = 0
        if step == "manual":
            self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x).mean(1))

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        if self.kind == "lengths":
            self.moved += 1
            batch = [batch[0][:, : max(1, batch[0].shape[1] - self.moved % 2)], batch[1]]
        return FORMS[self.form](batch)

    def on_train_epoch_start(self) -> None:
        if self.thaws and self.current_epoch == 1:
            self.net.blocks.requires_grad_(True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "out" in outputs:
            self.log("outputs", outputs["out"].abs().mean())

    def on_train_epoch_end(self) -> None:
        if self.collected:
            self.log("collected", torch.stack(self.collected).mean())
            self.collected.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = STEPS[self.kind](self, *tensors(batch))
        loss = out["loss"] if isinstance(out, dict) else out
        if loss is not None:
            self.log("train", loss, **LOGS[self.names[2]])
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = tensors(batch)
        out = self(x)
        self.error(out, y)
        self.log("error", self.error)
        self.log_dict({"val": F.mse_loss(out, y), "size": out.abs().mean()})

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(tensors(batch)[0])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.names[0]](self)
        more = SCHEDULERS[self.names[1]](optimizer)
        return {"optimizer": optimizer, "lr_scheduler": more} if more else optimizer


class Nudged(Drawn):
    """Its hook changes the gradients."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.01 * parameter.detach().sin()
