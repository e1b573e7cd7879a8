"""Checkpoints that cannot be written, and arguments that do not go together."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_pipeline import PipelineStrategy
from tests.distributed.fits import Script
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import vectors
from tests.models.modules import Perceptron


class OnRankZero(L.Callback):
    """Puts something into the checkpoint that no other rank knows of."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if trainer.global_rank == 0:  # the last stage
            checkpoint["mine"] = [p.detach() for p in module.parameters()]


def saving(path, *callbacks, plugins=(), **options):
    def after(trainer, module):
        trainer.save_checkpoint(path, **options)

    trainer = {"callbacks": list(callbacks), "limit_val_batches": 0, "max_steps": 1}
    trainer["plugins"] = list(plugins)
    return Script(Perceptron, lambda: vectors(32), trainer=trainer, after=after)


FAULTS = {
    "unknown to the others": (
        {},
        lambda path: saving(path / "x", OnRankZero(path / "y")),
        r"No rank holds mine\.\d, so the checkpoint would be incomplete",
    ),
    "storage options": (
        {"save_distributed_checkpoint": True},
        lambda path: saving(path / "x", storage_options={"a": 1}),
        r"storage_options must be None with save_distributed_checkpoint=True",
    ),
    "another way of writing": (
        {"save_distributed_checkpoint": True},
        lambda path: saving(path, plugins=[AsyncCheckpointIO()]),
        r"writes folders without a CheckpointIO, so AsyncCheckpointIO would never be called",
    ),
    "remote": (
        {"save_distributed_checkpoint": True},
        lambda path: saving("memory://x.ckpt"),
        r"must be on a file system that is mounted on all nodes, got 'memory://x.ckpt'",
    ),
    "something else is there": (
        {"save_distributed_checkpoint": True},
        lambda path: saving(path),
        r"A checkpoint must not replace '.*': it is a folder that holds something else",
    ),
    "averages": (
        {"gather_after_run": False},
        lambda path: saving(path, WeightAveraging()),
        r"gather_after_run=False\) cannot run the callback WeightAveraging: .*Set gather",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refusals(tmp_path, fault):
    (tmp_path / "kept").touch()
    arguments, script, message = FAULTS[fault]
    with pytest.raises(RankFailed, match=message):
        script(tmp_path).pipelined(2, deadline=30, **arguments)
    assert (tmp_path / "kept").exists()


def test_spread_modules_need_processes_that_live_on():
    with pytest.raises(ValueError, match="must go with start_method='popen', got 'spawn'"):
        PipelineStrategy(gather_after_run=False, start_method="spawn")
