"""Schedules that the first batch chooses, and cuts by measured time."""

from __future__ import annotations

import functools
import time
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipeline.order_files import schedule_of
from lightning_pipeline.planning import choosing
from lightning_pipeline.planning.candidates import Bounds
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.search import search_order
from lightning_pipeline.wording import plural
from tests.distributed.fits import Script, distance
from tests.distributed.test_exactness import LAYOUTS, MODELS, TOLERANCE, vectors


def chosen(trainer, module):
    plan = trainer.strategy.plan
    return plan.schedule, plan.num_stages, plan.microbatches, plan.notes


def script(model: str, replicas: int, **trainer) -> Script:
    make, dataset = MODELS[model]
    trainer = {"limit_val_batches": 0, **trainer}
    return Script(make, lambda: dataset(96 * replicas), trainer=trainer, after=chosen)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_chosen_is_exact_the_same_everywhere_and_said_once(layout, model):
    ranks, replicas = LAYOUTS[layout]
    plain = script(model, replicas)
    plain.after = None
    expected = plain.plain(replicas)
    runs = script(model, replicas).pipelined(ranks, replicas, schedule="auto")
    for run in runs:
        assert distance(run, expected) <= TOLERANCE
        assert run.extra == runs[0].extra
    schedule, _, microbatches, notes = runs[0].extra
    [note] = [note for note in notes if "schedule='auto'" in note]
    assert note.startswith(f"schedule='auto' has chosen {get_schedule(schedule).name} on {ranks}")
    assert plural(microbatches, "microbatch", "es") in note


@pytest.mark.parametrize("name", ["zbv_zero_bubble", "interleaved_1f1b", "gpipe"])
def test_the_mesh_follows_any_choice(name, monkeypatch):
    only = partial(Bounds, schedules=[get_schedule(name)])
    monkeypatch.setattr(choosing, "Bounds", only)
    monkeypatch.setattr(choosing, "searched", lambda outlook: None)
    runs = script("mlp", 2).pipelined(2, 2, schedule="auto")
    plain = script("mlp", 2)
    plain.after = None
    expected = plain.plain(2)
    for run in runs:
        assert run.extra[0] == get_schedule(name).name
        assert distance(run, expected) <= TOLERANCE


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_an_order_of_its_own_is_run_by_all_ranks(ranks, replicas, monkeypatch):
    """With a validation whose batches have fewer rows than the order has microbatches."""

    def of_the_first(outlook):
        known = outlook.fitting[0]
        schedule, _, _, depth, microbatches, _ = known.candidate
        lists = search_order(known.costs(outlook.limit), ranks, depth, microbatches)
        return known.with_schedule(schedule_of(lists, "Searched", schedule.placement, depth))

    monkeypatch.setattr(choosing, "searched", of_the_first)
    monkeypatch.setattr(choosing, "Bounds", partial(Bounds, schedules=[get_schedule("GPipe")]))
    settings = {"limit_val_batches": 2}
    given = {"schedule": "auto", "num_microbatches": 8}
    runs = script("transformer", replicas, **settings).pipelined(ranks, replicas, **given)
    plain = script("transformer", replicas, **settings)
    plain.after = None
    expected = plain.plain(replicas)
    for run in runs:
        assert run.extra[0] == "Searched" and run.extra[2] == 8
        assert "the orders searched for them" in run.extra[3][-1]
        assert distance(run, expected) <= TOLERANCE


def test_a_sanity_check_may_come_first():
    settings = {"limit_val_batches": 2, "num_sanity_val_steps": 1}
    runs = script("transformer", 1, **settings).pipelined(2, schedule="auto")
    plain = script("transformer", 1, **settings)
    plain.after = None
    expected = plain.plain()
    for run in runs:
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_what_is_given_is_kept():
    given = {"stages_per_rank": 2, "num_microbatches": 4}
    for run in script("transformer", 1).pipelined(2, schedule="auto", **given):
        assert run.extra[1:3] == (4, 4)


def test_a_later_evaluation_keeps_the_choice():
    def tested(trainer, module):
        before = trainer.strategy.plan.schedule, trainer.strategy.mesh.num_stages
        loader = script("mlp", 1).loader(vectors(96)[1])
        trainer.validate(module, loader, verbose=False)
        return before, (trainer.strategy.mesh.schedule.name, trainer.strategy.mesh.num_stages)

    fit = script("mlp", 1)
    fit.after = tested
    for run in fit.pipelined(2, schedule="auto"):
        assert run.extra[0] == run.extra[1]


class Sleepy(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


class Uneven(L.LightningModule):
    """Five equal layers by their cost, of which the first takes longer than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Sleepy(6, 6)
        self.rest = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))

    def forward(self, x):
        return self.rest(self.first(x))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Decaying(Uneven):
    """Its optimizer has state, steps in it, before the first batch."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1, lr_decay=0.5)


def steps_of(trainer, module):
    return {float(state["step"]) for state in trainer.optimizers[0].state.values()}


def test_choosing_leaves_the_optimizer_as_it_is():
    plain = Script(Decaying, lambda: vectors(96), trainer={"limit_val_batches": 0})
    expected = plain.plain()
    own = Script(Decaying, lambda: vectors(96), trainer={"limit_val_batches": 0}, after=steps_of)
    runs = own.pipelined(2, schedule="auto")
    for run in runs:
        assert run.extra == runs[0].extra
        assert distance(run, expected) <= TOLERANCE


def stages(trainer, module):
    return [stage.modules for stage in trainer.strategy.plan.stages]


@functools.cache
def uneven() -> Script:
    return Script(Uneven, lambda: vectors(96), trainer={"limit_val_batches": 0}, after=stages)


def test_the_cut_follows_the_measured_time_and_all_ranks_cut_alike():
    plain = Script(Uneven, lambda: vectors(96), trainer={"limit_val_batches": 0})
    expected = plain.plain()
    for by, first in (("cost", None), ("time", ("first",))):
        runs = uneven().pipelined(2, balance_by=by, num_microbatches=2)
        for run in runs:
            assert run.extra == runs[0].extra
            assert distance(run, expected) <= TOLERANCE
        assert (runs[0].extra[0] == first) == (by == "time")
