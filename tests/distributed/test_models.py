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
    "loss that reads values": modules.ValueDependentLoss,
    "layers with two names": modules.NamedTwice,
    "head of the training alone": modules.TrainingOnlyHead,
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
        modules.Perceptron,
        lambda: vectors(count),
        batch_size=count,
        trainer={"limit_val_batches": 0},
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


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_fillers_leave_no_trace_in_running_statistics(schedule):
    """Three rows are one microbatch of BatchNorm; the schedule asks for more of them."""
    script = Script(
        modules.BatchNormCNN, lambda: images(35), batch_size=16, trainer={"limit_val_batches": 0}
    )
    runs = script.pipelined(2, schedule=schedule, num_microbatches=4)
    counted = runs[0].state["model.1.num_batches_tracked"]
    # two epochs of batches cut in 4, 4 and (3 rows, at least 2 in each) 1
    assert int(counted) == 2 * (4 + 4 + 1)
    assert (
        distance(runs[0], script.pipelined(2, schedule="GPipe", num_microbatches=4)[0]) <= TOLERANCE
    )


@pytest.mark.parametrize("arguments", [{"module": "net"}, {"pipeline_parallel_size": 1}])
def test_other_arguments(arguments):
    script = Script(modules.Perceptron, lambda: vectors(48), trainer={"limit_val_batches": 1})
    expected = script.plain()
    ranks = arguments.pop("pipeline_parallel_size", 2)
    for run in script.pipelined(ranks, **arguments):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
