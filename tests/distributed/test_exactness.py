"""The contract: the same parameters as on one device, whatever the schedule and the layout."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from torch.utils.data import TensorDataset

from lightning_pipeline.schedules import SCHEDULES
from tests.distributed.fits import Run, Script, classes, distance, rows
from tests.models.modules import ImageClassifier, LanguageModel, Perceptron

TOLERANCE = 1e-12


def images(count: int) -> tuple[TensorDataset, TensorDataset]:
    def make(n: int, seed: int) -> TensorDataset:
        return TensorDataset(rows(n, 1, 8, 8, seed=seed), classes(n, top=10, seed=seed))

    return make(count, 1), make(20, 2)


def tokens(count: int) -> tuple[TensorDataset, TensorDataset]:
    def make(n: int, seed: int) -> TensorDataset:
        text = classes(n, 10, top=17, seed=seed)
        return TensorDataset(text[:, :-1], text[:, 1:])

    return make(count, 1), make(20, 2)


def vectors(count: int) -> tuple[TensorDataset, TensorDataset]:
    def make(n: int, seed: int) -> TensorDataset:
        return TensorDataset(rows(n, 6, seed=seed), rows(n, 3, seed=seed + 10))

    return make(count, 1), make(20, 2)


MODELS = {
    "cnn": (ImageClassifier, images),
    "transformer": (partial(LanguageModel, depth=2), tokens),
    "mlp": (Perceptron, vectors),
}
LAYOUTS = {"pp2": (2, 1), "pp4": (4, 1), "pp2xdp2": (2, 2)}
MICROBATCHES = 4
# Rows of the training data for one replica, and batches that are accumulated.
WINDOWS = {"plain": (96, 1), "accumulate3": (96, 3), "partial": (16 * 3 + 5, 1)}


def script(model: str, window: str, replicas: int) -> Script:
    make, dataset = MODELS[model]
    count, accumulate = WINDOWS[window]
    return Script(
        make,
        lambda: dataset(count * replicas),
        trainer={
            "accumulate_grad_batches": accumulate,
            "limit_val_batches": 0,
        },
    )


REFERENCES: dict[tuple[str, str, int], Run] = {}


def reference(model: str, window: str, replicas: int) -> Run:
    key = (model, window, replicas)
    if key not in REFERENCES:
        REFERENCES[key] = script(*key).plain(replicas)
    return REFERENCES[key]


# Schedules that torch does not have share all but their order with those that it has.
FEW = {
    ("pp2", "cnn", "accumulate3"),
    ("pp4", "transformer", "partial"),
    ("pp2xdp2", "mlp", "plain"),
}
CASES = [
    pytest.param(schedule, *case, id="-".join([schedule.snake, *case]))
    for schedule in SCHEDULES
    for case in itertools.product(LAYOUTS, MODELS, WINDOWS)
    if schedule.in_torch or case in FEW
]


@pytest.mark.parametrize(("schedule", "layout", "model", "window"), CASES)
def test_parameters_equal_one_device(schedule, layout, model, window):
    ranks, replicas = LAYOUTS[layout]
    expected = reference(model, window, replicas)
    count = max(MICROBATCHES, schedule.min_microbatches(ranks, schedule.default_stages_per_rank))
    arguments = {"schedule": schedule.name, "num_microbatches": count}
    runs = script(model, window, replicas).pipelined(ranks, replicas, **arguments)
    for run in runs:
        assert distance(run, expected) <= TOLERANCE
    for run in runs[::replicas] if replicas > 1 else runs:
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_the_modules_know_nothing_of_the_library():
    from pathlib import Path

    source = Path(__file__).parents[1] / "models" / "modules.py"
    assert "pipeline" not in source.read_text().lower()
