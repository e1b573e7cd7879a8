"""The first training step beside an unpipelined one."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from dataclasses import dataclass
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy, comparing, unpipelined
from lightning_pipeline.gradients import GradientReducer
from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.fits import Run, Script
from tests.distributed.test_exactness import images, tokens, vectors
from tests.distributed.test_weights import Tagger, ragged
from tests.models.modules import BatchNormCNN, FrozenPrefix, LanguageModel, Perceptron

LINE = re.compile(
    r"The first training step beside an unpipelined one on (?P<manner>.*?): "
    r"loss (?P<loss>\S+) and (?P<reference>\S+); largest difference of a gradient "
    r"(?P<absolute>\S+), (?P<relative>\S+) of its largest entry, in (?P<name>\S+) "
    r"\(stage (?P<stage>\d+)\); rounding of (?P<dtype>\S+) is expected, up to (?P<expected>[^;]+?)"
    r"(; left out: (?P<left_out>.*))?\.$"
)


@dataclass
class Told(Script):
    """A script whose runs leave what they printed and warned of."""

    def __call__(self, strategy, devices):
        out, warned = io.StringIO(), []
        with (
            contextlib.redirect_stdout(out),
            mock.patch.object(comparing, "rank_zero_warn", warned.append),
        ):
            run = super().__call__(strategy, devices)
        lines = [line for line in out.getvalue().splitlines() if "first training step" in line]
        return Run(run.state, run.metrics, (lines, warned, run.extra))


def told(run):
    """What rank 0 printed in its one line."""
    [line], _, _ = run.extra
    found = LINE.match(line)
    assert found is not None, line
    return found


class Drops(Perceptron):
    def __init__(self):
        super().__init__()
        layers = (part for layer in self.net for part in (layer, nn.Dropout(0.2)))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.scale * self.net(x + 0.1 * torch.randn_like(x)), y)


def tied():
    return LanguageModel(depth=2)


WHOLE, MICROBATCHES, PARTS = (manner.value for manner in unpipelined.Manner)
MODELS = {
    "plain": (Perceptron, vectors, WHOLE),
    "tied": (tied, tokens, WHOLE),
    "frozen": (FrozenPrefix, vectors, WHOLE),
    "weighted": (Tagger, ragged, WHOLE),
    "norms": (BatchNormCNN, images, MICROBATCHES),
    "random": (Drops, vectors, PARTS),
}
FLAGS = {"once": {}, "accumulated": {"accumulate_grad_batches": 2}}
LAYOUTS = {"pp2": (2, 1), "pp2xdp2": (2, 2)}
FEW = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
CASES = [
    *itertools.product(FEW[:1], LAYOUTS, FLAGS, MODELS),
    *itertools.product(FEW[1:], ["pp2"], ["accumulated"], MODELS),
    *itertools.product(
        [s.name for s in SCHEDULES if s.name not in FEW], ["pp2"], ["once"], ["tied"]
    ),
]


def script(model, flags, replicas=1, **others):
    make, dataset, _ = MODELS[model]
    trainer = {"limit_val_batches": 2, "max_steps": 2, **FLAGS[flags], **others}
    return Told(make, lambda: dataset(64 * replicas), trainer=trainer)


@pytest.mark.parametrize(("schedule", "layout", "flags", "model"), CASES)
def test_the_training_is_the_same_to_the_bit(schedule, layout, flags, model):
    ranks, replicas = LAYOUTS[layout]
    arguments = {"schedule": schedule, "num_microbatches": 4}
    runs = [
        script(model, flags, replicas).pipelined(ranks, replicas, validate=validate, **arguments)
        for validate in (None, "first_step")
    ]
    for without, run in zip(*runs, strict=True):
        assert without.extra[:2] == ([], [])
        assert without.metrics == run.metrics
        assert all(torch.equal(run.state[name], value) for name, value in without.state.items())
    first, *others = runs[1]
    assert all(run.extra[:2] == ([], []) for run in others) and not first.extra[1]
    found = told(first)
    batches = " of 2 batches each" if flags == "accumulated" else ""
    assert found["manner"] == MODELS[model][2] + batches
    assert float(found["loss"]) == pytest.approx(float(found["reference"]), rel=1e-8)
    assert found["dtype"] == "float64" and float(found["relative"]) < 1e-9


def single(count):
    return tuple(TensorDataset(*(t.float() for t in part.tensors)) for part in vectors(count))


def half(scale):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


PRECISIONS = {
    "float16": lambda: {"plugins": [half(2.0**10)], "gradient_clip_val": 0.1},
    "bfloat16": lambda: {"precision": "bf16-mixed"},
    "float32": dict,
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(precision, accumulate):
    def runs(**arguments):
        flags = {"max_steps": 2, "limit_val_batches": 0, "accumulate_grad_batches": accumulate}
        flags |= PRECISIONS[precision]()
        made = Told(Perceptron, lambda: single(64), trainer=flags, dtype=torch.float32)
        return made.pipelined(2, num_microbatches=4, **arguments)

    first, second = runs(validate="first_step")
    found = told(first)
    assert found["dtype"] == precision and not first.extra[1]
    assert 0 < float(found["absolute"]) < 0.1 and float(found["loss"]) > 0.1
    for run, expected in zip((first, second), runs(), strict=True):
        assert all(torch.equal(run.state[name], value) for name, value in expected.state.items())


class TooLarge(Perceptron):
    """The gradient of its scale is a sum over rows, in half precision."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return (self.scale * out.half()).mul(8).sub(batch[1]).float().square().mean()


def test_steps_that_overflow_are_told_of_and_the_next_ones_compared():
    """A whole batch overflows at a scale that its microbatches bear: then it is over."""
    flags = {"max_steps": 24, "limit_val_batches": 0, "plugins": [half(2.0**20)]}
    script = Told(TooLarge, lambda: single(128), trainer=flags, dtype=torch.float32)
    first, _ = script.pipelined(2, validate="first_step")
    *both, last = first.extra[0]
    assert both and not first.extra[1]
    text = "overflows with and without the pipeline at a loss scale of"
    assert all(text in line and line.endswith("the next one is compared.") for line in both)
    assert LINE.match(last) or last.endswith("32768: nothing is compared."), last


class NoNumber(Perceptron):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * torch.nan


def test_a_loss_that_is_no_number_is_told():
    script = Told(NoNumber, lambda: vectors(64), trainer={"max_steps": 1, "limit_val_batches": 0})
    [line], _, _ = script.pipelined(2, validate="first_step")[0].extra
    assert "loss nan and nan: neither is finite, and entries that are not in both" in line


def calls(trainer, module):
    return dict(module.calls)


def hooked(module):
    """Gradient hooks that count, of which one changes what it sees."""
    module.calls = {"hook": 0, "module": 0}

    def halve(gradient):
        module.calls["hook"] += 1
        return gradient / 2

    def count(*args):
        module.calls["module"] += 1

    module.net[4].weight.register_hook(halve)
    module.net[8].register_full_backward_hook(count)


def test_gradient_hooks_are_called_once_and_their_parameters_left_out():
    flags = {"max_steps": 2, "limit_val_batches": 0}
    script = Told(Perceptron, lambda: vectors(64), trainer=flags, setup=hooked, after=calls)
    without = script.pipelined(2, num_microbatches=4)
    runs = script.pipelined(2, num_microbatches=4, validate="first_step")
    assert told(runs[0])["left_out"] == "1 parameter with gradient hooks, net.4.weight first"
    assert not runs[0].extra[1]
    assert [run.extra[2] for run in runs] == [run.extra[2] for run in without]
    assert sum(run.extra[2]["hook"] for run in runs) > 0
    for run, expected in zip(runs, without, strict=True):
        assert all(torch.equal(run.state[name], value) for name, value in expected.state.items())


class Contrasts(Perceptron):
    """Its loss compares the rows of a batch."""

    def training_step(self, batch, batch_idx):
        out = F.normalize(self.net(batch[0]) * self.scale, dim=-1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


class Sums(Perceptron):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.scale * self.net(batch[0]), batch[1], reduction="sum")


class Forgets(Tagger):
    """Returns no weight for a mean over tokens."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("model", "dataset"), [(Contrasts, vectors), (Sums, vectors), (Forgets, ragged)]
)
def test_a_step_that_mixes_rows_is_warned_of(model, dataset, dtype):
    def data():
        parts = (part.tensors for part in dataset(64))
        return tuple(
            TensorDataset(*(t.to(dtype) if t.is_floating_point() else t for t in tensors))
            for tensors in parts
        )

    trainer = {"limit_val_batches": 0, "max_steps": 2}
    run, *_ = Told(model, data, trainer=trainer, dtype=dtype).pipelined(2, validate="first_step")
    found, [warning] = told(run), run.extra[1]
    assert float(found["relative"]) > 0.01
    assert f"the gradient of {found['name']} (stage {found['stage']}) differs far" in warning
    assert "mixes the rows of a batch: a contrastive loss" in warning


@pytest.mark.parametrize("model", ["plain", "weighted", "norms", "random"])
def test_gradients_that_the_pipeline_gets_wrong_are_warned_of(model):
    def divisor(reducer):
        return 1.0  # for the mean over two replicas

    with mock.patch.object(GradientReducer, "_divisor", divisor):
        run, *_ = script(model, "once", 2).pipelined(2, 2, validate="first_step")
    [warning] = run.extra[1]
    assert float(told(run)["relative"]) > 0.5 and "differs far beyond the rounding" in warning
    assert ("mixes the rows" in warning) == (MODELS[model][2] == WHOLE)
    assert ("Both saw the same microbatches" in warning) == (MODELS[model][2] != WHOLE)


def no_memory_on(rank):
    """Memory for copies that one rank does not have."""
    allocate = unpipelined.room

    def room(module, device):
        if module.global_rank == rank:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(module, device)

    return mock.patch.object(comparing, "room", room)


class FailsAlone(Perceptron):
    """Cannot run on a whole batch, on one rank."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) == 16 and self.global_rank == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().training_step(batch, batch_idx)


class Gathers(Perceptron):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.0 * self.all_gather(loss.detach()).mean()


@pytest.mark.parametrize(
    ("model", "patch", "replicas", "reason"),
    [
        (Perceptron, no_memory_on(1), 1, "rank 1 has no memory for the whole model and batch"),
        (FailsAlone, contextlib.nullcontext(), 1, "rank 1 has no memory for the whole model"),
        (Gathers, contextlib.nullcontext(), 2, "the step or a synchronised BatchNorm meets"),
    ],
)
def test_ranks_skip_together(model, patch, replicas, reason):
    trainer = {"limit_val_batches": 0, "accumulate_grad_batches": 2}
    quiet = Told(model, lambda: vectors(96 * replicas), trainer=trainer)
    layout = {"ranks": 2, "replicas": replicas, "num_microbatches": 4}
    without = quiet.pipelined(**layout)
    with patch:
        runs = quiet.pipelined(**layout, validate="first_step")
    [line], warned, _ = runs[0].extra
    assert f"is not compared with an unpipelined one: {reason}" in line and not warned
    assert all(run.extra[:2] == ([], []) for run in runs[1:])
    for run, expected in zip(runs, without, strict=True):
        assert all(torch.equal(run.state[name], value) for name, value in expected.state.items())


class Built(Perceptron):
    """Gets its weights with the placement."""

    def __init__(self):
        L.LightningModule.__init__(self)

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
            self.scale = nn.Parameter(torch.ones(()))


def test_a_module_without_weights_is_not_compared():
    trainer = {"limit_val_batches": 0, "max_steps": 1}
    script = Told(Built, lambda: vectors(32), trainer=trainer)
    first, _ = script.pipelined(2, validate="first_step")
    assert "the module was built without memory for its weights" in first.extra[0][0]


def test_each_fit_of_a_module_that_stays_spread_is_compared():
    def again(trainer, module):
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, DataLoader(vectors(64)[0], 16))

    flags = {"max_steps": 2, "limit_val_batches": 0}
    script = Told(Perceptron, lambda: vectors(64), trainer=flags, after=again)
    first, _ = script.pipelined(2, gather_after_run=False, validate="first_step")
    lines, warned, _ = first.extra
    assert [LINE.match(line)["dtype"] for line in lines] == ["float64"] * 2 and not warned


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="validate must be None or 'first_step', got 'always'"):
        PipelineStrategy(validate="always")
