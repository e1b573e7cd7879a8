"""Tests that run on the host in the ordinary suite, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_pipeline import transfers
from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.schedules import get_schedule
from tests.waits import watched

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:], indirect=True)


def mesh_of(schedule: str, device: torch.device) -> Mesh:
    """The place of the only rank, which holds all stages."""
    mesh = Mesh(MeshSizes(pipeline=1, data=1), get_schedule(schedule), 0)
    mesh.build_groups(device=device)
    return mesh


@contextmanager
def no_waits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where the block waits for the device, in which the host passes for one.

    Torch raises where it synchronises; an event of the code's own it lets pass.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    found: list[str] = []
    with monkeypatch.context() as patches:
        patches.setattr(transfers, "is_host", lambda device: False)
        with watched(found):
            yield
    assert found == []
