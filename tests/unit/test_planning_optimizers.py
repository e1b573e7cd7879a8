"""The predicted state of an optimizer is what it has after a real step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_pipeline.planning.optimizers import state_bytes

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)
        self.first.weight.requires_grad_(False)


def really(optimizer: Optimizer) -> dict[int, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return {
        id(p): sum(
            value.numel() * value.element_size()
            for value in optimizer.state.get(p, {}).values()
            if isinstance(value, Tensor)
        )
        if p.requires_grad
        else 0
        for p in parameters
    }


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_state_is_that_of_a_real_step(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    net = Net()
    optimizer = kind(net.parameters(), **settings)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found, notes = state_bytes([optimizer])
    assert notes == []
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert found == really(optimizer)


def test_adam_keeps_two_tensors_in_the_dtype_of_the_parameter() -> None:
    net = Net(torch.bfloat16).to("meta")
    found, _ = state_bytes([torch.optim.AdamW(net.parameters())])
    sizes = {id(p): p.numel() * p.element_size() for p in net.parameters() if p.requires_grad}
    assert {key: size for key, size in found.items() if size} == {
        key: 2 * size + 4 for key, size in sizes.items()
    }


def test_a_scheduler_and_hooks_see_nothing_of_it() -> None:
    calls: list[str] = []
    optimizer = torch.optim.Adam(Net().parameters())
    scheduler = StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *args: calls.append("hook"))
    state_bytes([optimizer])
    assert calls == [] and not optimizer.state
    assert scheduler.last_epoch == 0 and getattr(optimizer, "_opt_called", False) is False


class Reader(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["params"][0].sum().item() > 0


def test_what_cannot_be_known_is_assumed_and_said() -> None:
    net = nn.Linear(4, 4)
    found, notes = state_bytes([Reader(net.parameters())])
    assert found == {id(net.weight): 128, id(net.bias): 32}
    assert len(notes) == 1 and "Reader" in notes[0] and "two tensors" in notes[0]


class Counting(torch.optim.SGD):
    """Keeps numbers and lists of its own, beside the state of parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history: list[float] = []
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.history.append(1.0)
        self.count += 1
        return super().step(closure)


def frozen_state(optimizer: Optimizer) -> Any:
    own = {k: v for k, v in optimizer.__dict__.items() if k in ("history", "count")}
    return copy.deepcopy((optimizer.state_dict(), own))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*OPTIMIZERS, (torch.optim.Adagrad, {"lr_decay": 0.5}), (Counting, {"momentum": 0.9})],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_nothing_of_an_optimizer_changes(
    kind: type[Optimizer], settings: dict[str, Any], steps: int
) -> None:
    module = Net()
    module.scale = nn.Parameter(torch.ones(()))  # its momentum has no dims either
    optimizer = kind([p for p in module.parameters() if p.requires_grad], **settings)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    before = frozen_state(optimizer)
    state_bytes([optimizer])
    torch.testing.assert_close(frozen_state(optimizer), before, rtol=0, atol=0)
