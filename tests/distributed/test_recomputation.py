"""Activations that are computed again in the backward change no numbers."""

from __future__ import annotations

from collections import Counter
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_pipeline.options import recompute_of
from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, reference, script, vectors

STEPS, MICROBATCHES = 2, 4
FORWARDS: Counter[str] = Counter()
AT_END_OF_BATCH: list[Counter[str]] = []


class Block(nn.Module):
    """Draws numbers of all kinds, reads what it writes to a buffer and to an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))
        self.memory = torch.zeros(())

    def inner(self, x):
        FORWARDS[self.name] += 1
        return self.drop(self.norm(self.linear(x))).tanh()

    def forward(self, x):
        if self.training:
            self.seen += 1
            x = x * (1 + 0.1 * np.random.rand() + 0.01 * self.seen + self.memory)
            self.memory = 0.01 * x.detach().mean()
        return x + self.inner(x)


class ByItself(Block):
    """Uses torch.utils.checkpoint as users do."""

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Noisy(L.LightningModule):
    def __init__(self, block=Block) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), *(block(8) for _ in range(5)), nn.Linear(8, 3))
        for name, child in self.named_modules():
            child.name = name
        self.last = spectral_norm(nn.Linear(3, 3))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        out = self.last(self.net(batch[0]))
        loss = F.mse_loss(out, batch[1])
        self.log("loss", loss)
        self.outputs.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_):
        AT_END_OF_BATCH.append(Counter(FORWARDS))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.last(self.net(batch[0])), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def forwards(trainer, module):
    """Forwards of each block here for one microbatch."""
    done = AT_END_OF_BATCH[-1] - AT_END_OF_BATCH[0]
    per_step = (len(AT_END_OF_BATCH) - 1) * MICROBATCHES
    counts = {name: count / per_step for name, count in done.items()}
    AT_END_OF_BATCH.clear()
    return counts, [float(loss) for loss in module.outputs]


MANNERS = {
    "none": "none",
    "full": "full",
    "except_last": "except_last",
    "classes": [Block],
}
TRAINER = {"max_steps": STEPS, "limit_val_batches": 1}


def noisy(block=Block):
    data = lambda: vectors(64)  # noqa: E731
    return Script(partial(Noisy, block), data, 32, TRAINER, after=forwards)


def in_every_manner(schedule):
    """Noisy blocks in every manner, ones that checkpoint by themselves, an exact comparison."""
    v = schedule.default_stages_per_rank
    cuts = [f"net.{index}" for index in ((3,) if v == 1 else (2, 3, 4))]
    common = {"schedule": schedule.name, "num_microbatches": MICROBATCHES, "partition": cuts}
    runs = {
        name: noisy()({**common, "activation_checkpointing": manner}, 2)
        for name, manner in MANNERS.items()
    }
    own = noisy(ByItself)(common, 2)
    arguments = {**common, "partition": "auto", "activation_checkpointing": "full"}
    return runs, own, script("transformer", "plain", 1)(arguments, 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
def test_recomputation_changes_nothing(schedule):
    last = (f"net.{index}" for index in ((3, 4, 5) if schedule.is_single else (4, 5)))
    last = set(last)
    for runs, own, exact in run_ranks(2, in_every_manner, schedule):
        plain = runs.pop("none")
        for name, run in runs.items():
            assert distance(run, plain) == 0.0, name
            assert run.metrics == plain.metrics and run.extra[1] == plain.extra[1], name
            for block, count in run.extra[0].items():
                once = name == "except_last" and block in last
                assert count == (1 if once else 2), (name, block)
        assert set(plain.extra[0].values()) == {1}
        assert set(own.extra[0].values()) == {2}
        assert distance(exact, reference("transformer", "plain", 1)) <= TOLERANCE


class Factory(nn.Module):
    """Makes numbers of the default dtype, and matrix products that autocast rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_forward_hook(lambda *_: None)  # so that it runs as it is

    def forward(self, x):
        return (self.layer(x) * torch.rand(8)).sin()


class Precise(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), Factory(), Factory(), nn.Linear(8, 3))


def in_every_precision():
    runs = {}
    for precision in ("bf16-mixed", "64-true"):
        trainer = {"max_steps": STEPS, "limit_val_batches": 0, "precision": precision}
        one = Script(Precise, single_vectors, 32, trainer, dtype=torch.float32)
        for manner in ("none", "full"):
            runs[precision, manner] = one({"activation_checkpointing": manner}, 2)
    return runs


def single_vectors():
    return tuple(TensorDataset(*(t.float() for t in data.tensors)) for data in vectors(64))


def test_precision_is_that_of_the_first_run():
    for runs in run_ranks(2, in_every_precision):
        for precision in ("bf16-mixed", "64-true"):
            assert distance(runs[precision, "full"], runs[precision, "none"]) == 0.0


class Sporadic(Block):
    """Writes to its buffer from the second batch on."""

    def forward(self, x):
        if self.training and AT_END_OF_BATCH:
            self.seen += 1
        return x + self.inner(x) + np.random.rand()


def test_a_buffer_that_is_written_later_is_refused():
    with pytest.raises(RankFailed, match="Sporadic wrote to its buffer 'seen', which its earlier"):
        run_ranks(2, noisy(Sporadic), {"activation_checkpointing": [Sporadic]}, 2)


def test_classes_that_the_model_has_not_are_refused():
    text = "no Conv2d. Its blocks are of .*Block.*: name one of these"
    with pytest.raises(RankFailed, match=text):
        run_ranks(2, noisy(), {"activation_checkpointing": [nn.Conv2d]}, 2)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("all", ValueError, "For all stages say activation_checkpointing='full'"),
        ([], ValueError, "must name at least one module class"),
        ([nn.Linear(1, 1)], TypeError, "must list classes of modules"),
    ],
)
def test_other_arguments_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        recompute_of(given)
