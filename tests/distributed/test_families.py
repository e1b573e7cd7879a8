"""Steps that draw, weigh and differentiate: exact, the same under any cut, or refused."""

from __future__ import annotations

import functools
import re

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import TensorDataset

from tests.distributed.fits import Run, Script, classes, distance, rows
from tests.distributed.ranks import RankFailed
from tests.models import generative

TOLERANCE = 1e-12
LAYOUTS = {
    "2 stages, GPipe": (2, "GPipe"),
    "3 stages, 1F1B": (3, "1F1B"),
    "4 stages on 2 ranks, InterleavedZeroBubble": (2, "InterleavedZeroBubble"),
}


def pictures(count: int) -> TensorDataset:
    return TensorDataset(rows(count, 3, 9, 9, seed=1))


def vectors(count: int) -> TensorDataset:
    return TensorDataset(rows(count, 6, seed=1))


def sentences(count: int) -> TensorDataset:
    """Tokens, a quarter of them padding, and their tags."""
    padding = classes(count, 7, top=4, seed=3) == 0
    return TensorDataset(
        classes(count, 7, top=31, seed=1).masked_fill(padding, 0), classes(count, 7, top=7, seed=2)
    )


def script(model, data, **trainer) -> Script:
    """Two batches of which the second is smaller, two times."""
    return Script(model, lambda: (data(16 + 13), data(6)), trainer={"max_steps": 4, **trainer})


SCRIPTS = {
    "diffusion": functools.partial(
        script,
        generative.RepeatableDiffusion,
        pictures,
        callbacks=[EMAWeightAveraging(decay=0.7)],
    ),
    "variational": functools.partial(script, generative.RepeatableVariational, vectors),
    "named entities": functools.partial(script, generative.NamedEntities, sentences),
}


@functools.cache
def one_device(name: str) -> Run:
    return SCRIPTS[name]().plain()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_step_equals_one_device(name, layout):
    ranks, schedule = LAYOUTS[layout]
    expected = one_device(name)
    for run in SCRIPTS[name]().pipelined(ranks, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "data"), [(generative.Diffusion, pictures), (generative.Variational, vectors)]
)
def test_what_a_step_draws_does_not_depend_on_the_cut(model, data):
    """Each microbatch has one stream, on every stage; only one device draws for a whole batch."""
    runs = [
        script(model, data).pipelined(ranks, schedule=schedule, num_microbatches=4)[0]
        for ranks, schedule in LAYOUTS.values()
    ]
    assert distance(runs[0], script(model, data).plain()) > 1e-3  # it does draw
    for run in runs[1:]:
        assert distance(run, runs[0]) <= TOLERANCE
        assert run.metrics == pytest.approx(runs[0].metrics, rel=1e-12)


REFUSED = {
    "packed in the step": (
        generative.PackedInStep,
        sentences,
        r"self.lstm returns a PackedSequence.*pad_packed_sequence\(..., total_length=x.shape\[",
    ),
    "gradient in the step": (
        generative.GradientPenalty,
        vectors,
        "torch.autograd.grad for a gradient through a module.*into the forward of a module",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(case):
    model, data, message = REFUSED[case]
    with pytest.raises(RankFailed) as caught:
        script(model, data).pipelined(2, num_microbatches=4, deadline=30)
    said = str(caught.value).split("\nrank 1: ")
    assert len(said) == 2
    assert all(re.search(message, text, re.DOTALL) for text in said), caught.value
