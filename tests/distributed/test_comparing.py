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

from lightning_pipeline import comparing, unpipelined
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
    *itertools.product([s.name for s in SCHEDULES if s.name not in FEW], ["pp2"], ["once"], ["tied"]),
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
        return tuple(
            torch.utils.data.TensorDataset(
                *(t.to(dtype) if t.is_floating_point() else t for t in part.tensors)
            )
            for part in dataset(64)
        )

    trainer = {"limit_val_batches": 0, "max_steps": 2}
    run, *_ = Told(model, data, trainer=trainer, dtype=dtype).pipelined(2, validate="first_step")
    found, [warning] = told(run), run.extra[1]
    assert float(found["relative"]) > 0.01
    assert f"the gradient of {found['name']} (stage {found['stage']}) differs far" in warning
    assert "mixes the rows of a batch: a contrastive loss" in warning
