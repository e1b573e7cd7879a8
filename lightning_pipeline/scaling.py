"""The scale of 16-bit losses, which is the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def share_scaler(plugin: Any, device: torch.device) -> None:
    """Lets all ranks skip the same steps: each sees only its own infinities.

    Args:
        plugin: The precision plugin; its scaler, if it has one, is replaced.
        device: The rank's device.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, ShardedGradScaler):
        shared = ShardedGradScaler(device.type, process_group=dist.group.WORLD)
        shared.load_state_dict(scaler.state_dict())
        plugin.scaler = shared


def loss_scale(plugin: Any, device: torch.device) -> float | Tensor:
    """What losses are multiplied by before their backward.

    Args:
        plugin: The precision plugin.
        device: The rank's device.
    """
    scaler = getattr(plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.scale(torch.ones((), device=device))
