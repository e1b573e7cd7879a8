"""Steps that call several modules, under every schedule, against one device."""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import StepError
from lightning_pipeline.schedules import SCHEDULES
from lightning_pipeline.steps.pending import Pending, TensorMeta
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models import several
from tests.models.several import Base, mlp

ROWS, MICROBATCHES = 16, 4
# Their loss compares the samples of a batch, or they see it by BatchNorm, a queue or a permutation:
# the reference accumulates the same microbatches on one device.
OF_MICROBATCHES = {"NormedAutoEncoder", "SimCLR", "BYOL", "Mixup", "Queue"}
MODELS = [
    "LitAutoEncoder", "NormedAutoEncoder", "VAE", "DistributionVAE", "Siamese", "ProjectedSiamese",
    "SimCLR", "BYOL", "TeacherFirst", "StudentFirst", "BackboneAndHead", "Loop", "Mixup",
    "WritesAnswer", "Structured", "Counting", "Queue", "Backwards", "ContraryOrders",
]  # fmt: skip


def draws_of_the_batch():
    """Replaces random numbers by functions of what they are drawn for."""

    def randn_like(x, **kwargs):
        return torch.sin(100 * x.detach())

    def standard_normal(shape, dtype, device):
        return torch.linspace(-1, 1, shape[-1], dtype=dtype, device=device).expand(shape)

    def beta(a, b):
        x = sys._getframe(1).f_locals["x"]
        return 0.5 + 0.5 * np.sin(float(x.sum()))

    torch.randn_like, np.random.beta = randn_like, beta
    torch.distributions.normal._standard_normal = standard_normal
    torch.randperm = lambda n, **kwargs: torch.arange(n).flip(0)


class Drawn(Script):
    """A script whose draws are functions of the batch, run once for each of several strategies."""

    def __call__(self, strategies, devices):
        draws_of_the_batch()
        return [super(Drawn, self).__call__(strategy, devices) for strategy in strategies]


def script(name: str) -> Drawn:
    trainer = {"max_steps": 4, "limit_val_batches": 1}
    return Drawn(getattr(several, name), partial(vectors, 48), ROWS, trainer=trainer)


@cache
def reference(name: str, microbatches: int = MICROBATCHES):
    made = script(name)
    if name in OF_MICROBATCHES:
        made.batch_size = ROWS // microbatches
        made.trainer = made.trainer | {"accumulate_grad_batches": microbatches}
    return run_ranks(1, made, ["auto"], 1)[0][0]


def check(name: str, ranks: int, schedules: list[str], microbatches: int = MICROBATCHES) -> None:
    arguments = {"pipeline_parallel_size": ranks, "num_microbatches": microbatches}
    strategies = [{"schedule": schedule, **arguments} for schedule in schedules]
    expected = reference(name, microbatches)
    for runs in run_ranks(ranks, script(name), strategies, ranks, deadline=120):
        for schedule, run in zip(schedules, runs, strict=True):
            assert distance(run, expected) <= TOLERANCE, schedule
            if name not in OF_MICROBATCHES:
                assert run.metrics == pytest.approx(expected.metrics, rel=1e-12), schedule


@pytest.mark.parametrize("name", MODELS)
def test_all_schedules_equal_one_device(name):
    check(name, 2, [schedule.name for schedule in SCHEDULES])


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ["DistributionVAE", "ProjectedSiamese", "BYOL", "Loop", "Queue"])
def test_more_ranks_equal_one_device(name, ranks):
    check(name, ranks, ["1F1B", "ZBVZeroBubble"], 8)


class Refused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(6, 8, 8, 8), mlp(8, 8, 8, 3)

    def loss(self, x, y):
        return F.mse_loss(self.second(self.first(x)), y)


class FewerCalls(Refused):
    def training_step(self, batch, batch_idx):
        out = self.first(batch[0])
        return F.mse_loss(self.second(out) if batch_idx < 2 else out[:, :3], batch[1])


class OtherOrder(Refused):
    def training_step(self, batch, batch_idx):
        modules = [self.first, self.second]
        ones = [torch.ones(len(batch[0]), 6), torch.ones(len(batch[0]), 8)]
        both = zip(modules, ones, strict=True)
        return sum(m(x).square().mean() for m, x in (reversed([*both]) if batch_idx > 1 else both))


class DiffersByRank(Refused):
    def loss(self, x, y):
        return super().loss(x + float(os.environ["RANK"]), y)


class WritesToTheArgument(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3))


class ReturnsAnObject(Refused):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(6, 8, 8, 8)

        def forward(self, x):
            return torch.distributions.Normal(self.layers(x), 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Head()

    def loss(self, x, y):
        return F.mse_loss(self.second(self.first(x).mean), y)


class ReturnsANumber(Refused):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x):
            return self.layer(x), round(float(x[0, 0]), 3)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Head()

    def loss(self, x, y):
        out, number = self.first(x)
        return F.mse_loss(self.second(out), y) * number


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.runs, self.kind = mlp(6, 8, 8, 8, 3), 0, "plain"

    def forward(self, x, factor=1.0):
        return self.layers(x) * factor


class AnotherArgument(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.first(batch[0], 1.0 + batch_idx), batch[1])


class BareExcept(Refused):
    def loss(self, x, y):
        out = torch.zeros(len(x), 8)
        for module in (self.first, self.second):
            try:  # noqa: SIM105
                out = module(out if module is self.second else x)
            except:  # noqa: E722
                pass
        return F.mse_loss(out[:, :3], y)


class QueueUsedBefore(several.Queue):
    def loss(self, x, y):
        return super().loss(x + 0.0 * self.queue.mean(), y)


class BackwardsWithBatchNorm(several.NormedAutoEncoder):
    validation_step = several.Backwards.validation_step


class CountsInForward(Refused):
    class Counting(Scaled):
        def forward(self, x):
            self.runs += 1
            return super().forward(x) / self.runs

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Counting()

    def loss(self, x, y):
        return F.mse_loss(self.first(x), y)


class CountsInALeaf(CountsInForward):
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.runs = 0

        def forward(self, x):
            self.runs += 1
            return super().forward(x)


class CountsOnAModule(Refused):
    def training_step(self, batch, batch_idx):
        self.first.runs = getattr(self.first, "runs", 0) + 1
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.first.runs = 0


class AnotherShape(Refused):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.second(self.first(x.repeat(1 + batch_idx, 1)))[: len(x)], y)


REFUSED = {
    AnotherShape: r"makes .* of shape \(8, 8\) where .* \(4, 8\) was planned.*shapes that a step",
    FewerCalls: "made 1 of the 2 calls .* missing are self.second.*multiply their loss by 0",
    OtherOrder: "calls self.second as number 1; it was planned with 2.*self.first, self.second",
    DiffersByRank: "the arguments of self.first on stage 1 differ from those on the stage before",
    WritesToTheArgument: "Call 2 of the step, self.second, writes in place to its argument.*False",
    ReturnsAnObject: "self.first returns an object of type Normal.*Return its tensors",
    ReturnsANumber: r"self.first returned -?[\d.]+ where -?[\d.]+ was planned.*as a tensor",
    AnotherArgument: r"self.first is called with .*2\.0.*; it was cut for.*1\.0.*as a tensor",
    BareExcept: "swallowed the BaseException.*bare `except:`.*Catch `Exception` instead",
    QueueUsedBefore: "itself writes to 'queue'.*in place behind the last call",
    BackwardsWithBatchNorm: "must be on one of the stages .*same order in every step",
    CountsInForward: "changes the number self.first.runs, now 2.*on_train_batch_start",
    CountsInALeaf: "changes the number self.first.runs, now 2.*as a buffer",
    CountsOnAModule: "changes the number self.first.runs, now 2.*on the LightningModule itself",
}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_what_stages_cannot_follow_is_refused(model):
    validates = model in (BackwardsWithBatchNorm, QueueUsedBefore)
    refused = Script(model, partial(vectors, 64), ROWS, {"limit_val_batches": int(validates)})
    with pytest.raises(RankFailed, match=f"(?s){REFUSED[model]}"):
        refused.pipelined(2, schedule="GPipe", num_microbatches=4, deadline=30)


def test_a_pending_value_cannot_be_read():
    pending = Pending.like(TensorMeta((2,), torch.float64, True), torch.device("cpu"))
    assert (pending * 2 + 1).shape == (2,)
    for read in (Tensor.tolist, float, lambda p: torch.zeros(2).add_(p)):
        with pytest.raises(StepError, match="a value that a later pipeline stage computes"):
            read(pending.sum() if read is float else pending)


class KeepsWhatItSaw(Refused):
    """Numbers that each run sets alike are no counters; a helper's are told of."""

    class Helper:
        runs = 0

    class Sees(Scaled):
        def forward(self, x):
            self.width, self.kind = x.shape[1], "seen"
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.helper = self.Sees(), self.Helper()
        self.helper.runs = 0

    def loss(self, x, y):
        self.helper.runs += 1
        return F.mse_loss(self.first(x), y)


class Warned(Script):
    def __call__(self, strategy, devices):
        with warnings.catch_warnings(record=True) as told:
            filtered, warnings.filterwarnings = warnings.filterwarnings, lambda *args: None
            warnings.simplefilter("always")
            run = super().__call__(strategy, devices)
            warnings.filterwarnings = filtered
        run.extra = [str(w.message) for w in told]
        return run


def test_a_counting_helper_is_told_of():
    made = Warned(KeepsWhatItSaw, partial(vectors, 48), ROWS, {"limit_val_batches": 0})
    expected = made.plain()
    for run in made.pipelined(2, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert any("training_step changes self.helper.runs" in text for text in run.extra)
        assert not any("self.first" in text and "changes" in text for text in run.extra)
