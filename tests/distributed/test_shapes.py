"""Batches of many lengths: each is planned once, and nothing is built for it again."""

from __future__ import annotations

from functools import cache, partial

import lightning as L
import pytest
import torch

from lightning_pipeline import engine, observing
from lightning_pipeline.steps import analyst
from tests.distributed.feeds import Feeds
from tests.distributed.fits import classes, distance
from tests.models.modules import LanguageModel

LENGTHS = [*range(5, 25)]
ROUNDS = [*LENGTHS, *LENGTHS[::-1], *LENGTHS[::2], *LENGTHS[1::2]]
BUILDERS = {
    "passes": (engine.Engine, "_build"),
    "surveys": (observing, "survey"),
    "recordings": (analyst, "record"),
}


NOW = dict.fromkeys(BUILDERS, 0)


def counted(name, call):
    def wrapper(*args, **kwargs):
        NOW[name] += 1
        return call(*args, **kwargs)

    return wrapper


class Counted(LanguageModel):
    """Notes how often each builder has run by the end of every step."""

    def on_train_start(self):
        self.counts = []
        for name, (owner, attribute) in BUILDERS.items():
            setattr(owner, attribute, counted(name, getattr(owner, attribute)))

    def on_train_batch_end(self, *_):
        self.counts.append(dict(NOW))


def texts():
    batches = []
    for number, length in enumerate(ROUNDS):
        text = classes(8, length + 1, top=17, seed=number)
        batches.append((text[:, :-1], text[:, 1:]))
    return {"train_dataloaders": torch.utils.data.DataLoader(batches, batch_size=None)}


def counts_of(trainer: L.Trainer, module: Counted):
    return module.counts


SCRIPT = Feeds(
    partial(Counted, depth=2),
    lambda: (None, None),
    trainer={"max_steps": len(ROUNDS), "max_epochs": 1},
    after=counts_of,
    data=texts,
)
SCRIPT.loader = SCRIPT.validation_loader = lambda dataset: None


@cache
def reference():
    return SCRIPT.plain()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_twenty_lengths_in_turn_build_nothing_anew(schedule):
    runs = SCRIPT.pipelined(2, schedule=schedule, num_microbatches=2)
    for run in runs:
        assert distance(run, reference()) <= 1e-12
        assert len(run.extra) == len(ROUNDS)
        first, warm = run.extra[0], run.extra[len(LENGTHS) - 1]
        assert run.extra[-1] == warm  # two more rounds
        new = {name: warm[name] - first[name] for name in warm}
        once = len(LENGTHS) - 1
        assert new == {"passes": once, "surveys": once, "recordings": once}
