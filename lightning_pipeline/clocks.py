"""The clocks of the ranks of a run, compared."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_pipeline.mesh import Mesh

_PINGS = 16


class Offset(NamedTuple):
    """What is to be added to a rank's clock.

    Attributes:
        seconds: Global rank 0's monotonic clock minus this rank's.
        accuracy: How far from the truth that may be, in seconds: half of the fastest ping's round
            trip, 0 where both are one clock.
    """

    seconds: float
    accuracy: float


def clock_name() -> str:
    """A name of the monotonic clock: that of the machine since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def offset_of_clock(mesh: Mesh, device: torch.device) -> Offset:
    """Compares this rank's monotonic clock with that of global rank 0; every rank calls it.

    Ranks on one host have one clock. Otherwise the last rank of each pipeline sends pings to the
    others of it, and global rank 0 to the last ranks of the other pipelines; the fastest counts.

    Args:
        mesh: The rank's place, groups built.
        device: The rank's device, whose tensors the groups carry.
    """
    names = [""] * len(mesh.pipeline_ranks) * mesh.sizes.data
    dist.all_gather_object(names, clock_name())
    if len(set(names)) == 1:
        return Offset(0.0, 0.0)
    last = mesh.pipeline_ranks.index(mesh.last_rank)
    own = _compare(mesh.pipeline_group, last, device)
    if mesh.sizes.data == 1:
        return own
    box = [_compare(mesh.data_group, 0, device) if mesh.is_last else None]
    dist.broadcast_object_list(box, mesh.last_rank, mesh.pipeline_group)
    assert box[0] is not None
    return Offset(own.seconds + box[0].seconds, own.accuracy + box[0].accuracy)


def _compare(group: dist.ProcessGroup, reference: int, device: torch.device) -> Offset:
    """Compares the clocks of a group with that of one of its ranks."""
    rank, found = dist.get_rank(group), Offset(0.0, 0.0)
    for other in range(dist.get_world_size(group)):
        if other == reference:
            continue
        if rank == reference:
            _send(_ping(group, other, device), group, other, device)
        elif rank == other:
            for _ in range(_PINGS):
                _receive(group, reference, device)
                _send(Offset(time.monotonic(), 0.0), group, reference, device)
            found = _receive(group, reference, device)
    return found


def _ping(group: dist.ProcessGroup, other: int, device: torch.device) -> Offset:
    """The clock of this rank minus that of another one, which answers."""
    found = []
    for _ in range(_PINGS):
        start = time.monotonic()
        _send(Offset(0.0, 0.0), group, other, device)
        there = _receive(group, other, device).seconds
        half = (time.monotonic() - start) / 2
        found.append(Offset(start + half - there, half))
    return min(found, key=lambda offset: offset.accuracy)


def _send(offset: Offset, group: dist.ProcessGroup, to: int, device: torch.device) -> None:
    message = torch.tensor(offset, dtype=torch.float64, device=device)
    dist.send(message, group=group, group_dst=to)


def _receive(group: dist.ProcessGroup, source: int, device: torch.device) -> Offset:
    message = torch.empty(2, dtype=torch.float64, device=device)
    dist.recv(message, group=group, group_src=source)
    return Offset(*message.tolist())
