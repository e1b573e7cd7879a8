"""What callbacks and loggers take for granted on one device, made true for a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeline.lightning_private import (
    replace_check_for_sigterm,
    replace_check_for_validation,
    replace_transfer,
    throughputs,
    validates_by_time,
)
from lightning_pipeline.mesh import MeshSizes
from lightning_pipeline.splitting import is_elsewhere, state_items


def count_replicas(callbacks: Iterable[Callback], sizes: MeshSizes) -> None:
    """Lets a ThroughputMonitor take a pipeline for one device of its ranks' joint speed.

    Samples, batches and FLOPs a second are those of the pipeline under ``device/`` and those of
    all replicas without it; the utilisation is that of a pipeline's ranks together.

    Args:
        callbacks: All callbacks of the run, set up.
        sizes: Extents of the axes.
    """
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs(callback):
                throughput.world_size = sizes.data
                if callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * sizes.pipeline


def decide_together(trainer: Trainer) -> None:
    """Lets rank 0 decide for all when to validate and, without a wait for a device, when to stop.

    Args:
        trainer: The Trainer, with its strategy set up.
    """
    _validate_together(trainer)
    _stop_together(trainer)


def _validate_together(trainer: Trainer) -> None:
    """Lets rank 0's clock decide for all when ``val_check_interval`` is a time.

    Lightning asks each rank's own, and a rank that validates alone waits for the others for ever.
    """
    if validates_by_time(trainer):
        broadcast = trainer.strategy.broadcast
        replace_check_for_validation(trainer, lambda decide: broadcast(decide()))


def _stop_together(trainer: Trainer) -> None:
    """Lets rank 0 tell on the host, before each batch, whether there was a SIGTERM on any rank.

    Lightning asks on the device, where the answer comes behind all that was given to it, and hides
    that a rank does not answer.
    """

    def told() -> None:
        if trainer.strategy.must_stop():  # type: ignore[attr-defined]
            raise SIGTERMException

    replace_check_for_sigterm(trainer, told)


def keep_examples_with_weights(module: LightningModule) -> Callable[[], None]:
    """Sends ``example_input_array`` to where the weights are before the first batch.

    Summaries and loggers of graphs run the whole module on it, while ``module.device`` is already
    the device that gets a part of the weights later. Batches of loaders come with a device.

    Args:
        module: The user's LightningModule, not placed yet.

    Returns:
        A function that ends it.
    """
    tensors = (t for *_, t in state_items(module) if not is_elsewhere(t))
    home = next((t.device for t in tensors), torch.device("cpu"))

    def homewards(original: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            return original(batch, device or home, dataloader_idx)

        return transfer

    return replace_transfer(module, homewards)
