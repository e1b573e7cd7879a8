"""Hooks and steps see on every rank what they would see on one device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import get_total_norm

from tests.distributed.fits import Script, distance
from tests.distributed.test_exactness import TOLERANCE, tokens, vectors
from tests.models.modules import LanguageModel


def encoded(texts):
    return torch.tensor(list("|".join(texts).encode()))


class Base(L.LightningModule):
    """Three layers whose hooks note what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen: list[object] = []

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Nudged(LanguageModel):
    """Tied weights, and a hook that reads and changes the gradients after every backward."""

    def on_after_backward(self):
        self.log("norm", grad_norm(self, 2)["grad_2.0_norm_total"])
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.01 * parameter.detach().sin()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class NudgedApart(Nudged):
    """The embedding has gradients, and the optimizer does not know it."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.blocks.parameters(), lr=0.3)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", [Nudged, NudgedApart])
def test_gradients_are_whole_after_every_backward(model, accumulate, replicas):
    trainer = {"limit_val_batches": 0, "accumulate_grad_batches": accumulate, "max_steps": 3}

    script = Script(partial(model, depth=2), lambda: tokens(112 * replicas), trainer=trainer)
    expected = script.plain(replicas)
    for run in script.pipelined(2, replicas, schedule="ZBVZeroBubble"):
        assert distance(run, expected) <= TOLERANCE
        if replicas == 1:  # a replica's own part of the gradient, before the mean
            assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


@dataclass
class Answer:
    values: torch.Tensor
    positive: torch.Tensor


class SetsAttributes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first_rows, self.cached, self.last_loss = None, None, None
        self.lists, self.made, self.nested = {"x": [], "y": []}, defaultdict(list), [[], []]

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.cached is None:
            self.cached = torch.ones(4, 4)  # as many rows as a microbatch, and set once
        self.answers, self.half = (
            self(x),
            {"mean": x.mean(), "names": [f"{v:.3f}" for v in x[:, 0]]},
        )
        loss = F.mse_loss(self.answers, y)
        self.last_loss = loss.item()
        self.rows = len(x)
        self.answer = Answer(self.answers, (self.answers > 0).sum())
        self.lists["x"].append(x)
        self.made[batch_idx].append({"rows": len(x), "index": batch_idx})
        self.nested[batch_idx % 2].append(loss.detach())
        return {"loss": loss, "four": 4, "index": batch_idx, "rows": len(x), "hits": (y > 0).sum()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(
            {
                "answers": self.answers.detach(),
                "mean": self.half["mean"],
                "names": encoded(self.half["names"]),
                "cached": self.cached,
                "loss": [self.last_loss, outputs["loss"].detach()],
                "rows": self.rows,
                "answer": [self.answer.values.detach(), self.answer.positive],
                "lists": [list(self.lists["x"]), dict(self.made), [list(x) for x in self.nested]],
                "outputs": {k: v for k, v in outputs.items() if k != "loss"},
            }
        )


class LogsNorms(Base):
    def on_before_optimizer_step(self, optimizer):
        for order in (2, "inf"):
            self.log_dict(grad_norm(self, norm_type=order))
        self.log_dict(grad_norm(self.second, norm_type=1, group_separator="."))
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("total", get_total_norm(gradients))
        self.seen.append({k: v for k, v in grad_norm(self, norm_type=2).items()})


class Gathers(Base):
    def training_step(self, batch, batch_idx):
        x, y = batch
        gathered = self.all_gather(x)
        assert gathered.shape[-2:] == x.shape and gathered.ndim == (2 if self.copies == 1 else 3)
        features = torch.tanh(self.first(x))
        both = self.all_gather(features, sync_grads=True)
        strategy = self.trainer.strategy
        scale = strategy.reduce(x.abs().mean().detach(), reduce_op="mean")
        strategy.barrier()
        word = strategy.broadcast({"from": self.trainer.global_rank})
        assert strategy.reduce_boolean_decision(True) and word["from"] >= 0
        out = self.third(torch.tanh(self.second(features)))
        return F.mse_loss(out, y) + 0.1 * both.pow(2).mean() + 0 * scale

    def on_train_batch_end(self, outputs, batch, batch_idx):
        gathered = self.all_gather(batch[0].mean())
        total = self.trainer.strategy.reduce(batch[0].mean(), reduce_op="sum")
        self.seen.append([gathered, total, encoded(self.trainer.strategy.broadcast(["word"]))])


def script(model, copies=1):
    def make():
        module = model()
        module.copies = copies
        return module

    return Script(
        make,
        lambda: vectors(48 * copies),
        trainer={"limit_val_batches": 0, "max_steps": 3},
        after=lambda trainer, module: module.seen,
    )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("model", [SetsAttributes, LogsNorms, Gathers])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_hooks_and_steps_see_what_they_see_on_one_device(model, replicas, schedule):
    expected = script(model, replicas).plain(replicas)
    runs = script(model, replicas).pipelined(2, replicas, schedule=schedule, num_microbatches=4)
    for rank, run in enumerate(runs):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
        if rank % replicas == 0:  # the reference is what the first replica saw
            torch.testing.assert_close(run.extra, expected.extra, rtol=1e-12, atol=1e-14)
