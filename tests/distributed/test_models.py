"""Models and steps of every kind, exact under the schedules that treat them differently."""

from __future__ import annotations

import pytest

from tests.distributed.fits import Script, distance
from tests.distributed.test_exactness import TOLERANCE, images, vectors
from tests.models import modules

KINDS = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
MODELS = {
    "frozen prefix": modules.FrozenPrefix,
    "two towers": modules.TwoTowers,
    "two calls": modules.Autoencoder,
    "siamese": modules.Siamese,
    "one linear": modules.OneLinear,
    "loss with a buffer, unused parameter": modules.WeightedLoss,
    "forward that logs": modules.LogsInForward,
}


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_model_equals_one_device(model, schedule):
    script = Script(MODELS[model], lambda: vectors(48), trainer={"limit_val_batches": 2})
    expected = script.plain()
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.parametrize("schedule", KINDS)
def test_batch_norm_equals_accumulated_microbatches(schedule):
    """The reference sees the same microbatches, one after the other, on one device."""
    pipelined = Script(modules.BatchNormCNN, lambda: images(64), trainer={"limit_val_batches": 0})
    plain = Script(
        modules.BatchNormCNN,
        lambda: images(64),
        batch_size=4,
        trainer={"limit_val_batches": 0, "accumulate_grad_batches": 4},
    )
    expected = plain.plain()
    for run in pipelined.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "DualPipeV"])
def test_batch_smaller_than_the_microbatches(schedule, count):
    script = Script(
        modules.Perceptron, lambda: vectors(count), batch_size=count, trainer={"limit_val_batches": 0}
    )
    expected = script.plain()
    for run in script.pipelined(2, schedule=schedule, num_microbatches=8):
        assert distance(run, expected) <= TOLERANCE


@pytest.mark.parametrize("partition", ["uniform", ("net.4",), ("net.13",)])
def test_partition_argument(partition):
    script = Script(modules.Perceptron, lambda: vectors(48), trainer={"limit_val_batches": 1})
    expected = script.plain()
    for run in script.pipelined(2, partition=partition):
        assert distance(run, expected) <= TOLERANCE


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_stages_per_rank(schedule, stages):
    script = Script(modules.Perceptron, lambda: vectors(48), trainer={"limit_val_batches": 1})
    expected = script.plain()
    for run in script.pipelined(2, schedule=schedule, stages_per_rank=stages):
        assert distance(run, expected) <= TOLERANCE
