"""What monitors take for granted on one device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeline.mesh import MeshSizes
from lightning_pipeline.monitoring import (
    count_replicas,
    decide_together,
    keep_examples_with_weights,
)
from tests.models.modules import OneLinear


def test_examples_go_to_the_weights_and_batches_to_the_device():
    module, example = OneLinear(), torch.ones(2, 6)
    module._device = torch.device("meta")  # where a strategy on another device says it is
    end = keep_examples_with_weights(module)
    assert module._apply_batch_transfer_handler(example).device.type == "cpu"
    assert module._apply_batch_transfer_handler(example, module.device).is_meta
    end()
    assert module._apply_batch_transfer_handler(example).is_meta


def test_utilisation_is_that_of_all_ranks_of_a_pipeline():
    monitor = ThroughputMonitor(len, window_size=2)
    monitor.available_flops = 10.0
    throughput = monitor._throughputs["train"] = Throughput(10.0, world_size=8, window_size=2)
    count_replicas([monitor], MeshSizes(pipeline=4, data=2))
    for step in (1, 2):
        throughput.update(time=step, batches=step, samples=8 * step, flops=30)
    computed = throughput.compute()
    assert computed["samples_per_sec"] == 2 * computed["device/samples_per_sec"] == 16
    assert computed["device/mfu"] == pytest.approx(30 / (4 * 10.0))


@pytest.mark.parametrize("stops", [True, False])
def test_all_ranks_stop_before_the_same_batch(stops):
    loop = SimpleNamespace()
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(must_stop=lambda: stops),
        fit_loop=SimpleNamespace(epoch_loop=loop),
        _val_check_time_interval=None,
    )
    decide_together(trainer)
    with pytest.raises(SIGTERMException) if stops else nullcontext():
        loop._broadcast_sigterm_tensor()
