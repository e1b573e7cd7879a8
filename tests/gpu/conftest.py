"""The device of a test, and a process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_pipeline.mesh import with_host


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The host or the first GPU, with its index as Lightning gives it."""
    return torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[None]:
    """The default process group, of this process alone."""
    backend = with_host("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
