"""What is alive of each microbatch, against what the schedule needs."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import ClassVar

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipeline import engine
from lightning_pipeline.actions import action_lists
from lightning_pipeline.lowering import Transfer, lower
from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.fits import Script
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import vectors

STEPS, MICROBATCHES = 2, 8


class Alive:
    """Counts what is alive of each kind."""

    def __init__(self) -> None:
        self.refs, self.peaks = defaultdict(list), defaultdict(int)

    def add(self, kind, thing):
        self.refs[kind].append(weakref.ref(thing))
        self.peaks[kind] = max(self.peaks[kind], self.count(kind))

    def count(self, kind):
        self.refs[kind] = [ref for ref in self.refs[kind] if ref() is not None]
        return len(self.refs[kind])


class Marked(nn.Module):
    """Saves a tensor that only the graph of its microbatch keeps alive."""

    alive: ClassVar = Alive()

    def __init__(self, index, width) -> None:
        super().__init__()
        self.index = index
        self.layer, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.register_forward_hook(lambda *_: None)  # so that it runs as it is

    def forward(self, x):
        if not self.training:
            return self.last(self.layer(x))
        # A graph keeps a tensor's memory, not the Python object: here that is an array.
        marker = np.full(x.shape[-1], 2.0)
        self.alive.add(self.index, marker)
        return self.last(self.layer(x) * torch.from_numpy(marker))


class Chain(L.LightningModule):
    def __init__(self, num_stages) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Marked(index, 6) for index in range(num_stages)))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0])[:, :3], batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def peaks(ranks, schedule, recompute):
    """Most markers of each stage, and most receive buffers, that were alive at once here."""
    receive = engine._Pass._receive

    def noted(self, transfer):
        receive(self, transfer)
        messages, _ = self._coming[transfer[1:4]]
        for message in messages:
            Marked.alive.add((transfer.stage, transfer.kind), message)

    v = schedule.default_stages_per_rank
    engine._Pass._receive = noted
    gc.disable()  # what a collection would have to find is held too long
    Script(
        lambda: Chain(ranks * v),
        lambda: vectors(MICROBATCHES * STEPS * 2),
        MICROBATCHES * 2,
        {"max_steps": STEPS, "limit_val_batches": 0},
    )(
        {
            "schedule": schedule.name,
            "num_microbatches": MICROBATCHES,
            "partition": [f"net.{index}" for index in range(1, ranks * v)],
            "activation_checkpointing": recompute,
        },
        ranks,
    )
    alive = Marked.alive
    left = {kind: alive.count(kind) for kind in list(alive.refs)}
    return dict(alive.peaks), left


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
def test_no_more_microbatches_are_alive_than_the_schedule_needs(schedule, ranks):
    v = schedule.default_stages_per_rank
    lists = action_lists(schedule, ranks, v, MICROBATCHES)
    wanted: dict = defaultdict(int)
    for steps in lower(lists, ranks * v):
        now: dict = defaultdict(int)
        for step in steps:
            kind, change = step.stage, 0
            if isinstance(step, Transfer):
                kind, change = (step.stage, step.kind), 0 if step.sends else 1
            else:
                # What a backward of the inputs has used is let go; the weights' part may keep what
                # the stage has got.
                change = {"F": 1, "B": -1, "I": -1, "W": 0}[step.op]
                for message in ("F", "B"):
                    now[step.stage, message] -= step.op in "BW"
            now[kind] += change
            wanted[kind] = max(wanted[kind], now[kind])
    found = run_ranks(ranks, peaks, ranks, schedule, "none")
    most: dict = defaultdict(int)
    for here, left in found:
        assert not any(left.values()), left
        for kind, count in here.items():
            most[kind] = max(most[kind], count)
    for kind, count in wanted.items():
        # One more message may be posted than the clock of equal actions says.
        most_allowed = count if isinstance(kind, int) else count + 1
        assert most[kind] <= most_allowed, kind
        assert most[kind] == count or not isinstance(kind, int), kind
