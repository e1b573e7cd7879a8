"""Activations that are computed again in the backward change no numbers."""

from __future__ import annotations

from collections import Counter, deque
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

from lightning_pipeline.errors import StepError
from lightning_pipeline.options import recompute_of
from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, reference, script, vectors

STEPS, MICROBATCHES = 2, 4
FORWARDS: Counter[str] = Counter()
AT_END_OF_BATCH: list[Counter[str]] = []
BATCHES: list[int] = []


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


class Stateful(nn.Module):
    """Ends in something whose gradient needs what was computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.state = self.first()

    def first(self):
        return torch.zeros(())

    def forward(self, x):
        y = self.linear(x) * (np.random.rand() + self.factor())  # so that it runs as it is
        if self.training:
            self.move(0.1 * x.detach().mean())
        return (y * y).sin()

    def factor(self):
        return self.state.clone()


class Conditioned(Stateful):
    """The step sets its state before each call."""

    def move(self, value):
        pass


class ConditionedInside(Conditioned):
    """The step sets an entry of a dictionary before each call."""

    def first(self):
        return {}

    def factor(self):
        return self.state["it"]


class WrittenByStep(Conditioned):
    """The step writes to a tensor before each call."""


class Written(Stateful):
    """Writes to a tensor that is no buffer."""

    def move(self, value):
        self.state.copy_(value)


class WrittenLarge(Written):
    def first(self):
        return torch.zeros(5, 2**12)

    def factor(self):
        return self.state[0, 0].clone()


class Draws(Stateful):
    """Draws from its own generators."""

    def first(self):
        return torch.Generator().manual_seed(3), np.random.default_rng(3), np.random.RandomState(3)

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy, self.old = self.state

    def factor(self):
        return torch.rand((), generator=self.torch) + self.numpy.random() + self.old.rand()

    def move(self, value):
        pass


class Appends(Stateful):
    def first(self):
        return []

    def factor(self):
        return 0.1 * len(self.state)

    def move(self, value):
        self.state.append(value)


class AppendsToQueue(Appends):
    def first(self):
        return deque(maxlen=3)


class SetsEntry(Stateful):
    def first(self):
        return {"a": [torch.zeros(())]}

    def factor(self):
        return self.state["a"][0]

    def move(self, value):
        self.state["a"][0] = value


class WritesToArray(Stateful):
    def first(self):
        return np.zeros(2)

    def factor(self):
        return float(self.state[1])

    def move(self, value):
        self.state[1] = float(value)


class FillsBuffer(Stateful):
    """Fills a buffer that is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled", None, persistent=False)

    def factor(self):
        return 0 if self.filled is None else self.filled

    def move(self, value):
        self.filled = value


class NewAttribute(Stateful):
    """Makes an attribute in its first call."""

    def factor(self):
        return getattr(self, "memory", 0)

    def move(self, value):
        self.memory = value


class Recurrent(Stateful):
    """Goes on from what it computed before, with its graph."""

    def first(self):
        return None

    def forward(self, x):
        self.state = (
            self.linear(x) + np.random.rand() + (0 if self.state is None else self.state.sin())
        ).tanh()
        return self.state.sin()


class Skips(Stateful):
    """Leaves out its norm in some calls, the first one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.inner.register_buffer("seen", torch.zeros(()))

    def first(self):
        return 0

    def forward(self, x):
        if np.random.rand() > 2 or (self.training and BATCHES[-1] % 2):
            self.inner.seen += 0.1
            return x + self.norm(self.inner(x)) * (1 + self.inner.seen)
        return x + self.linear(x).tanh()


KEEPING = [
    *(Conditioned, ConditionedInside, WrittenByStep, Written, WrittenLarge, Draws, Appends),
    *(AppendsToQueue, SetsEntry, WritesToArray, FillsBuffer, NewAttribute, Recurrent, Skips),
]


class Keeper(L.LightningModule):
    def __init__(self, kind) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), kind(), nn.Linear(8, 3)
        BATCHES.append(0)

    def training_step(self, batch, batch_idx):
        if isinstance(self.block, ConditionedInside):
            self.block.state["it"] = batch[0][:, :1]
        elif isinstance(self.block, WrittenByStep):
            self.block.state.copy_(batch[0].mean())
        elif isinstance(self.block, Conditioned):
            self.block.state = batch[0][:, :1]
        x = self.first(batch[0])
        if isinstance(self.block, Recurrent):
            self.block.state = None
            x = self.block(self.block(x))
        return F.mse_loss(self.last(self.block(x)), batch[1])

    def on_train_batch_end(self, *_):
        BATCHES[-1] += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_each(kinds, manners):
    """A run of each kind of block in each manner, or the message that it ends with."""
    trainer = {"max_steps": 2, "limit_val_batches": 0}
    runs = {}
    for kind in kinds:
        one = Script(partial(Keeper, kind), lambda: vectors(64), 32, trainer)
        for manner in manners:
            chosen = [kind] if manner == "classes" else manner
            arguments = {"activation_checkpointing": chosen, "partition": ["block"]}
            common = {"schedule": "GPipe", "num_microbatches": MICROBATCHES}
            try:
                runs[kind, manner] = one({**common, **arguments}, 2)
            except StepError as error:
                runs[kind, manner] = str(error)
                break  # what the ranks have sent each other is of no use now
    return runs


def test_what_a_module_keeps_is_what_it_was():
    for runs in run_ranks(2, of_each, KEEPING, ("none", "full")):
        for (kind, manner), run in runs.items():
            assert not isinstance(run, str), (kind, manner, run)
            assert distance(run, runs[kind, "none"]) == 0.0, (kind, manner)


class WritesInside(SetsEntry):
    def move(self, value):
        self.state["a"][0].copy_(value)

    def factor(self):
        return self.state["a"][0].clone()


class Sporadic(WrittenLarge):
    """Writes to its buffer from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        del self.state
        self.register_buffer("state", self.first())

    def move(self, value):
        if BATCHES[-1]:
            self.state.copy_(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WritesInside, "WritesInside: the attribute 'state' holds a tensor that was written to"),
        (Sporadic, "Sporadic wrote to its buffer 'state', which its earlier calls did not"),
    ],
)
def test_what_cannot_be_put_back_is_refused(kind, text):
    with pytest.raises(RankFailed, match=text):
        run_ranks(2, alone, kind)


def alone(kind):
    (found,) = of_each([kind], ("classes",)).values()
    if isinstance(found, str):
        raise StepError(found)


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
