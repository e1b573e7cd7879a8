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
    # What a backward of the inputs has used is let go; the weights' part keeps two tensors a layer.
    wanted: dict = defaultdict(int)
    for actions in lists:
        held: dict = defaultdict(int)
        for stage, op, _ in actions:
            held[stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[op]
            wanted[stage] = max(wanted[stage], held[stage])
    found = run_ranks(ranks, peaks, ranks, schedule, "none")
    most: dict = defaultdict(int)
    for here, left in found:
        assert not any(left.values()), left
        for kind, count in here.items():
            most[kind] = max(most[kind], count)
    assert {stage: most[stage] for stage in wanted} == wanted
    for stage, count in wanted.items():
        # The next message may arrive while all that is needed is there.
        assert most[stage, "F"] <= count + 1
        assert most[stage, "B"] <= count
