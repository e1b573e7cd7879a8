"""What ranks must have in common when a run begins, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting import (
    UNPLACED,
    canonical_names,
    is_elsewhere,
    restore,
    state_items,
)
from lightning_pipeline.steps import random_state, set_random_state


def share_state(module: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Starts every rank with the weights of global rank 0, which stay where they are.

    Of a module that an earlier run left spread, each part comes from the first replica. What no
    rank holds yet is left out.

    Args:
        module: The module, whole or spread.
        mesh: The rank's place, groups built.
        device: The rank's device.
    """
    tensors = list({id(t): t for *_, t in state_items(module)}.values())
    source, group = 0, None
    if any(is_elsewhere(t) and t.elsewhere_holders != UNPLACED for t in tensors):
        source, group = mesh.data_ranks[0], mesh.data_group
    for tensor in tensors:
        if not (is_elsewhere(tensor) or is_lazy(tensor)):
            value = tensor.data.to(device).contiguous()
            dist.broadcast(value, source, group)
            tensor.data.copy_(value)


def share_random_state(mesh: Mesh, device: torch.device) -> None:
    """Lets ranks of one pipeline shuffle alike, with or without a seed.

    Args:
        mesh: The rank's place, groups built.
        device: The rank's device.
    """
    box = [random_state()]
    dist.broadcast_object_list(box, mesh.last_rank, mesh.pipeline_group)
    set_random_state(box[0])
    if device.type == "cuda":
        torch.cuda.manual_seed(torch.initial_seed())


def make_whole(
    module: nn.Module, holders: Mapping[str, frozenset[int]], mesh: Mesh, device: torch.device
) -> None:
    """Makes a module whole again on every rank, from the ranks that hold its parts.

    Its tensors are on the host then: a device may not hold the whole model.

    Args:
        module: The module, spread over the ranks of a pipeline.
        holders: Stages that hold each tensor, by canonical name.
        mesh: The rank's place, groups built.
        device: The rank's device.
    """
    canonical = canonical_names(module)
    with torch.inference_mode(False), torch.no_grad():
        for *_, name, tensor in list(state_items(module)):
            if canonical[name] == name and name in holders:
                _fetch(tensor, mesh.holder_ranks(holders[name])[0], mesh, device)


def _fetch(tensor: Tensor, owner: int, mesh: Mesh, device: torch.device) -> None:
    if is_elsewhere(tensor):
        value = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    else:
        value = tensor.data.to(device).contiguous()
    dist.broadcast(value, owner, mesh.pipeline_group)
    if is_elsewhere(tensor):
        restore(tensor, value.cpu())
    else:
        tensor.data = value.cpu()
