"""Stages that torch compiles change no numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_pipeline.options import compile_of
from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_compile import part, parts_in_place, whole
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron

EAGER = {"backend": "aot_eager"}


class Block(nn.Sequential):
    pass


class Mixed(Perceptron):
    """Two calls, one of them cut, with what is easily lost when code is compiled."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (Block(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)) for _ in range(2))
        self.net = nn.Sequential(nn.Linear(6, 8), *blocks, nn.Tanh(), nn.Linear(8, 3))
        self.head = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.scale * self.head(self.net(batch[0])), batch[1])
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        GRAPHS.append(counters["stats"]["unique_graphs"])


GRAPHS: list[int] = []


def compare(make, schedule, arguments, partition="auto"):
    """The script without compilation and with it; the graphs that each batch has made."""
    script = Script(make, lambda: vectors(64), 32, {"max_steps": 3, "limit_val_batches": 1})
    runs = []
    for more in ({}, arguments):
        GRAPHS.clear()
        counters.clear()
        common = {"schedule": schedule, "num_microbatches": 4, "partition": partition}
        runs.append(script({**common, **more}, 2))
        runs[-1].extra = list(GRAPHS)
    return runs


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
def test_compiled_stages_equal_eager_ones(schedule):
    """With recomputation under every other schedule."""
    again = {"activation_checkpointing": "full"} if schedule.splits_backward else {}
    found = run_ranks(2, compare, Mixed, schedule.name, {"compile": EAGER, **again})
    for eager, run in found:
        assert distance(run, eager) <= TOLERANCE
        assert run.metrics == pytest.approx(eager.metrics, rel=1e-12)
        assert set(eager.extra) == {0}
        assert len(set(run.extra)) == 1 and run.extra[0] > 0  # none after the first batch


@pytest.mark.parametrize("make", [part, parts_in_place, whole])
def test_modules_that_the_user_has_compiled(make):
    for eager, run in run_ranks(2, compare, make, "1F1B", {"compile": EAGER}):
        assert distance(run, eager) <= TOLERANCE


@pytest.mark.slow
def test_inductor():
    found = run_ranks(2, compare, Perceptron, "1F1B", {"compile": True}, deadline=300)
    for eager, run in found:
        assert distance(run, eager) <= TOLERANCE


def test_blocks_are_compiled_one_by_one_if_they_are_computed_again():
    arguments = {"compile": EAGER, "activation_checkpointing": [Block]}
    for eager, run in run_ranks(2, compare, Mixed, "1F1B", arguments, ("net.2",)):
        assert distance(run, eager) <= TOLERANCE
        assert len(set(run.extra)) == 1 and run.extra[0] > 0


@pytest.mark.parametrize("given", ["max-autotune", 1])
def test_other_arguments_are_refused(given):
    with pytest.raises(TypeError, match="must be True, False or a dict with arguments of torch"):
        compile_of(given)


class CompiledOptimizer(Perceptron):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        return optimizer


def test_a_compiled_optimizer_step_is_refused():
    with pytest.raises(RankFailed, match="Leave the step of SGD as it is; fused=True makes one"):
        run_ranks(2, compare, CompiledOptimizer, "1F1B", {})
