"""Pieces that are timed one by one, and what is left of it: nothing."""

from __future__ import annotations

import time
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.steps import Analyst, Request, Survey, survey
from lightning_pipeline.timing import time_pieces

HOST = torch.device("cpu")
ALONE = Mesh(MeshSizes(1, 1), get_schedule("GPipe"), 0)


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


class Picky(nn.Linear):
    """Does not like the values that are made up."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and bool((x == 1).all()):
            raise RuntimeError("not this")
        return super().forward(x)


class Remembering(nn.Linear):
    """Draws from a generator of its own, and keeps what its first forward made."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.generator = torch.Generator().manual_seed(1)
        self.table: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.table.append(float(torch.rand((), generator=self.generator)))
        return super().forward(x)


class Net(L.LightningModule):
    def __init__(self, *kinds: type[nn.Linear]) -> None:
        super().__init__()
        layers = [nn.Sequential(kind(16, 16), nn.BatchNorm1d(16), nn.Dropout()) for kind in kinds]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


def surveyed(module: L.LightningModule) -> Survey:
    batch = torch.randn(8, 16), torch.randn(8, 16)
    analyst = Analyst(module, 8, HOST)
    asked = Request(
        module, "training_step", batch, (0,), analyst, nullcontext, HOST, 0, made_up=False
    )
    return survey(asked)


def test_a_slow_piece_is_found_and_nothing_is_left_of_the_measurement() -> None:
    module = Net(nn.Linear, Slow, nn.Linear)
    found = surveyed(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = {name: id(value) for name, value in module.named_parameters()}
    state = torch.get_rng_state()
    time_pieces(found, nullcontext, ALONE, HOST)
    [call] = found.calls
    names = call.program.piece_names if call.program is not None else []
    slow = [cost for name, cost in zip(names, call.cost, strict=True) if name.endswith("1.0")]
    assert sum(slow) >= 0.01 > sum(call.cost) - sum(slow)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert tensors == {name: id(value) for name, value in module.named_parameters()}
    assert all(p.grad is None for p in module.parameters())


def test_what_a_module_draws_and_keeps_is_put_back() -> None:
    module = Net(nn.Linear, Remembering, nn.Linear)
    found = surveyed(module)
    own = module.net[1][0]
    state, table = own.generator.get_state(), list(own.table)
    time_pieces(found, nullcontext, ALONE, HOST)
    assert torch.equal(own.generator.get_state(), state)
    assert own.table == table


def test_a_piece_that_does_not_run_by_itself_keeps_its_cost_in_proportion() -> None:
    found = surveyed(Net(Picky, nn.Linear))
    [call] = found.calls
    assert call.program is not None
    costs = list(call.cost)
    time_pieces(found, nullcontext, ALONE, HOST)
    index = call.program.piece_names.index("0.0")
    rest = sum(call.cost) - call.cost[index], sum(costs) - costs[index]
    assert call.cost[index] == pytest.approx(costs[index] * rest[0] / rest[1])
