"""What a step carries from batch to batch on the LightningModule is that of one device."""

from __future__ import annotations

import enum
from collections import deque
from functools import partial
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.fits import Script, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Recurrent(Base):
    """Goes on from the hidden state of the batch before; its batches are the second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.after = nn.Linear(8, 3)
        self.hidden = None

    def on_train_epoch_start(self):
        self.hidden = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.hidden is None:
            self.hidden = (x.new_zeros(2, len(x), 8), x.new_zeros(2, len(x), 8))
        out, hidden = self.lstm(torch.tanh(self.before(x)), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return F.mse_loss(self.after(out), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(torch.stack(self.hidden).clone())


class PassesNone(Recurrent):
    """The module makes the first state, so its first call has other arguments."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out, hidden = self.lstm(torch.tanh(self.before(x)), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return F.mse_loss(self.after(out), y)


class Counters(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.steps, self.samples, self.odd, self.factor = 0, 0, False, 1.0
        self.checks = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.steps += 1
        self.samples += len(x)
        self.odd = not self.odd
        self.factor *= 0.9
        loss = F.mse_loss(self.net(x), y)
        return loss * self.factor + (0.1 * loss if self.odd else 0)

    def validation_step(self, batch, batch_idx):
        self.checks += 1
        self.log("loss", F.mse_loss(self.net(batch[0]), batch[1]) * self.factor)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        numbers = [self.steps, self.samples, self.odd, self.factor, self.checks]
        self.seen.append(torch.tensor(numbers))


class Mode(enum.Enum):
    WARM, COLD = 1, 2


class Odd(Base):
    """State that begins late, is of the class, is used, or only looks carried."""

    kept = 0

    def __init_subclass__(cls, *, needed="a subclass of this needs an argument", **kwargs):
        super().__init_subclass__(**kwargs)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.late, self.factor, self.rows, self.samples = 0, 1.0, 0, 0
        self.mode, self.quiet = Mode.WARM, None
        self.register_buffer("center", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert type(self) is Odd
        if batch_idx > 0:
            self.late += 1
            self.factor = self.factor * 0.9
        self.kept += 1
        if self.rows >= 0:
            self.rows = len(x)
        self.samples += len(x)
        self.mode = Mode.COLD if self.mode is Mode.WARM else Mode.WARM
        if batch_idx % 2:
            self.quiet = x[:, :2]
        loss = F.mse_loss(self.net(x), y) * self.factor / self.samples
        self.log("samples", self.samples)
        self.log("rows", len(x))
        return loss * (2 if self.mode is Mode.COLD else 1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.center.mul_(0.9).add_(0.1 * outputs["loss"])
        numbers = [self.late, self.factor, self.kept, self.rows, self.samples, self.mode.value]
        self.seen.append([torch.tensor(numbers), self.center.clone(), self.quiet])


def sequences(count):
    return lambda: (
        TensorDataset(rows(count, 5, 6), rows(count, 5, 3, seed=3)),
        TensorDataset(rows(8, 5, 6), rows(8, 5, 3)),
    )


def see(trainer, module):
    return module.seen


CASES = {
    "hidden state": Script(Recurrent, sequences(48), trainer={"limit_val_batches": 0}, after=see),
    "hidden state or none": Script(
        PassesNone, sequences(48), trainer={"limit_val_batches": 0}, after=see
    ),
    "hidden state, accumulated": Script(
        Recurrent,
        sequences(64),
        trainer={"limit_val_batches": 0, "accumulate_grad_batches": 2},
        after=see,
    ),
    "odd": Script(Odd, lambda: vectors(16 * 3 + 5), trainer={"limit_val_batches": 0}, after=see),
    "counters": Script(Counters, lambda: vectors(16 * 3 + 5), after=see),
}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("case", CASES)
def test_carried_state_equals_one_device(case, schedule):
    expected = CASES[case].plain()
    for run in CASES[case].pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
        torch.testing.assert_close(run.extra, expected.extra, rtol=1e-12, atol=1e-14)


def test_carried_state_of_replicas_equals_ddp():
    script = Script(Recurrent, sequences(96), trainer={"limit_val_batches": 0}, after=see)
    expected = script.plain(2)
    for rank, run in enumerate(script.pipelined(2, 2, num_microbatches=3)):
        assert distance(run, expected) <= TOLERANCE
        if rank % 2 == 0:
            torch.testing.assert_close(run.extra, expected.extra, rtol=1e-12, atol=1e-14)


class SumsLosses(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total += loss.item()
        return loss


class MovingAverage(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return F.mse_loss(out - self.center, batch[1])


class AddsInPlace(SumsLosses):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = Perceptron.training_step(self, batch, batch_idx)
        self.total += loss.detach()
        return loss


class BeginsLate(Perceptron):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        before = getattr(self, "average", None)
        now = loss.detach()
        self.average = now if before is None else 0.9 * before + 0.1 * now
        return loss


class CountsInADict(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.stats = {"steps": 0}

    def training_step(self, batch, batch_idx):
        self.stats["steps"] += 1
        return super().training_step(batch, batch_idx)


class CountsHits(Perceptron):
    """None in the first batch, one in each later microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0

    def training_step(self, batch, batch_idx):
        self.hits += int((batch[0][:1, 0] > -1e9).sum()) * (batch_idx > 0)
        return super().training_step(batch, batch_idx)


class Window(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.window = []

    def training_step(self, batch, batch_idx):
        self.window.append(batch[0].mean())
        if len(self.window) > 2:
            self.window.pop(0)
        return super().training_step(batch, batch_idx)


class CountsInAnObject(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.state, self.array = SimpleNamespace(n=0), np.zeros(2)

    def training_step(self, batch, batch_idx):
        self.state.n += 1
        return super().training_step(batch, batch_idx)


class CountsInAnArray(CountsInAnObject):
    def training_step(self, batch, batch_idx):
        self.array += 1
        return Perceptron.training_step(self, batch, batch_idx)


class SwapsFunctions(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.then = (lambda x: x), (lambda x: 2 * x)

    def training_step(self, batch, batch_idx):
        self.now, self.then = self.then, self.now
        return self.now(super().training_step(batch, batch_idx))


class Deletes(Perceptron):
    def training_step(self, batch, batch_idx):
        if hasattr(self, "once"):
            del self.once
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.once = 1


class QueuesInADeque(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.queue = deque(maxlen=3)

    def training_step(self, batch, batch_idx):
        self.queue.append(batch[0].mean())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "count", "message"),
    [
        (SumsLosses, 48, "reads self.total and then sets it to something.*on_train_batch_end"),
        (MovingAverage, 48, "reads self.center and then sets it to something.*torchmetrics"),
        (AddsInPlace, 48, "changes self.total in place.*on_train_batch_end"),
        (BeginsLate, 48, "reads self.average and then sets it to something"),
        (CountsInADict, 48, r"changes self.stats\['steps'\] in place.*setting an attribute"),
        (CountsHits, 48, "reads self.hits and then sets it to something"),
        (Window, 64, "changes self.window in place"),
        (CountsInAnObject, 48, r"changes self.state\['n'\] in place"),
        (CountsInAnArray, 48, "changes self.array in place"),
        (SwapsFunctions, 48, "reads self.then and then sets it to something with objects|self.now"),
        (Deletes, 48, "changes self.once in place"),
        (QueuesInADeque, 48, "changes self.queue in place.*appending to lists"),
        (Recurrent, 40, r"self.hidden carries samples.*dim 1.*\(2, 16, 8\).*8 samples.*drop_last"),
    ],
)
def test_state_that_microbatches_cannot_share_is_refused(model, count, message):
    data = sequences(count) if model is Recurrent else lambda: vectors(count)
    script = Script(model, data, trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        script.pipelined(2, deadline=30)


@pytest.mark.parametrize("model", [SumsLosses, MovingAverage])
def test_a_single_microbatch_knows_the_whole_batch(model):
    script = Script(
        model,
        lambda: vectors(40),
        trainer={"limit_val_batches": 0},
        after=lambda trainer, module: torch.as_tensor(getattr(module, CARRIED[model])),
    )
    expected = script.plain()
    for run in script.pipelined(2, schedule="GPipe", num_microbatches=1):
        assert distance(run, expected) <= TOLERANCE
        torch.testing.assert_close(run.extra, expected.extra, rtol=1e-12, atol=1e-14)


CARRIED = {SumsLosses: "total", MovingAverage: "center"}


class OneRow(Script):
    """A first batch of one row, which is not cut, then batches that are."""

    def loader(self, training):
        return DataLoader(training, batch_sampler=[[0], [*range(1, 9)], [*range(9, 17)]])


@pytest.mark.parametrize("model", [Counters, SumsLosses])
def test_the_first_batch_need_not_be_cut(model):
    script = OneRow(model, lambda: vectors(17), trainer={"limit_val_batches": 0, "max_steps": 6})
    if model is SumsLosses:
        with pytest.raises(RankFailed, match=r"reads self\.total and then sets it"):
            script.pipelined(2, deadline=30)
        return
    script.after = see
    expected = script.plain()
    for run in script.pipelined(2):
        assert distance(run, expected) <= TOLERANCE
        torch.testing.assert_close(run.extra, expected.extra, rtol=1e-12, atol=1e-14)


class Numbered(Perceptron):
    """Weighs each batch by its number."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.number = start

    def training_step(self, batch, batch_idx):
        self.number += 1
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.number)


@pytest.mark.parametrize(
    ("rows", "microbatches", "start"), [(2, 2, 0), (2, 2, 1), (3, 2, 0), (3, 2, 1), (4, 4, 0)]
)
def test_a_count_of_batches_is_none_of_samples(rows, microbatches, start):
    """Also where a batch has one row more than a microbatch, which is as far as a count goes."""
    script = Script(
        partial(Numbered, start),
        lambda: vectors(3 * rows),
        rows,
        {"limit_val_batches": 0, "max_steps": 5},
        after=lambda trainer, module: module.number,
    )
    expected = script.plain()
    assert expected.extra == start + 5
    for run in script.pipelined(2, schedule="GPipe", num_microbatches=microbatches):
        assert run.extra == expected.extra
        assert distance(run, expected) <= TOLERANCE
