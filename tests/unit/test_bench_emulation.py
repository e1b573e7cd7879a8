"""Layers that sleep: their gradients, where they sleep, and whose order that is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.backward import split_backward
from lightning_pipeline.bench.emulation import SLEEPS, Sleep, SleepingLayer, sleep_precisely
from lightning_pipeline.bench.limit import out_of_order, seconds_of, take_sleeps
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import StageTime, simulate, simulate_measured

SECONDS = StageTime(0.002, 0.004, 0.006)


@pytest.fixture(autouse=True)
def _no_sleeps_before() -> Iterator[None]:
    SLEEPS.clear()
    yield
    SLEEPS.clear()


def layer() -> tuple[SleepingLayer, Tensor]:
    """A layer whose weight is not zero, and an input."""
    torch.manual_seed(0)
    made = SleepingLayer(3, SECONDS, 8).double()
    torch.nn.init.normal_(made.weight)
    return made, torch.randn(5, 8, dtype=torch.float64, requires_grad=True)


def ops() -> list[str]:
    return [sleep.op for sleep in SLEEPS]


def check_gradients(made: SleepingLayer, x: Tensor, grad: Tensor) -> None:
    torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)
    torch.testing.assert_close(made.anchor.grad, grad.sum(0), rtol=0, atol=0)
    torch.testing.assert_close(made.weight.grad, grad.sum(0), rtol=0, atol=0)


def test_whole_backward_sleeps_both_parts_and_has_real_gradients() -> None:
    made, x = layer()
    out = made(x)
    torch.testing.assert_close(out, x + made.weight, rtol=0, atol=0)
    assert ops() == ["F"]
    grad = torch.randn_like(out)
    out.backward(grad)
    assert sorted(ops()) == ["F", "I", "W"]
    check_gradients(made, x, grad)


def test_sleeps_are_as_long_as_asked() -> None:
    sleep_precisely()
    made, x = layer()
    made(x).sum().backward()
    for sleep in SLEEPS:
        assert sleep.layer == 3
        least = SECONDS.of(sleep.op)
        assert least <= sleep.end - sleep.start < least + 0.05


def test_split_backward_of_torch_sleeps_each_part_in_its_turn() -> None:
    made, x = layer()
    out = made(x)
    grad = torch.randn_like(out)
    (x.grad,), groups = stage_backward_input((out,), [grad], [x], made.parameters())
    assert ops() == ["F", "I"]
    stage_backward_weight(made.parameters(), groups)
    assert ops() == ["F", "I", "W"]
    check_gradients(made, x, grad)


def test_split_backward_of_the_engine_sleeps_each_part_in_its_turn() -> None:
    made, x = layer()
    out = made(x)
    grad = torch.randn_like(out)
    [x.grad], deferred = split_backward([(get_gradient_edge(out), grad)], [x])
    assert ops() == ["F", "I"]
    deferred.run()
    assert ops() == ["F", "I", "W"]
    check_gradients(made, x, grad)


def test_split_backward_of_a_first_stage_sleeps_each_part_in_its_turn() -> None:
    made, x = layer()
    out = made(x.detach())
    _, deferred = split_backward([(get_gradient_edge(out), torch.ones_like(out))], [])
    assert ops() == ["F", "I"]
    deferred.run()
    assert ops() == ["F", "I", "W"]


def test_first_stage_has_an_input_gradient_too() -> None:
    made, x = layer()
    made(x.detach()).sum().backward()
    assert sorted(ops()) == ["F", "I", "W"]


def test_evaluation_sleeps_for_the_forward_only() -> None:
    made, x = layer()
    with torch.no_grad():
        made(x)
    assert ops() == ["F"]


def log_of(lists: list[list[Action]], steps: int = 1) -> list[Sleep]:
    """Sleeps in the order of the lists, rank by rank; a whole backward has W first."""
    log, clock = [], 0.0
    for _ in range(steps):
        for row in lists:
            for stage, op, _m in row:
                for part in "WI" if op == "B" else op:
                    log.append(Sleep(stage, part, clock, clock + 1.0))
                    clock += 1.0
    return log


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_own_order_is_no_other(name: str, steps: int) -> None:
    schedule = get_schedule(name)
    lists = action_lists(schedule, 2, schedule.default_stages_per_rank, 8)
    log = log_of(lists, steps)
    assert out_of_order(lists, log, steps) == set()
    assert out_of_order(lists, log[:-1], steps) != set()
    assert out_of_order(lists, [*log, log[-1]], steps) != set()


def test_a_backward_that_is_not_split_is_found() -> None:
    schedule = get_schedule("ZBVZeroBubble")
    lists = action_lists(schedule, 2, 2, 8)
    whole = [
        Action(stage, "B", m) if op == "I" and stage == 1 else Action(stage, op, m)
        for stage, op, m in lists[1]
        if not (op == "W" and stage == 1)
    ]
    assert out_of_order(lists, log_of([lists[0], whole])) == {1}


def test_path_of_measured_sleeps() -> None:
    lists = action_lists(get_schedule("1F1B"), 2, 1, 4)
    log = [
        Sleep(stage, op, 0.0, 2.0 if (stage, op) == (0, "F") else 1.0)
        for stage, op, *_ in log_of(lists)
    ]
    seconds = seconds_of(lists, log)
    assert seconds[Action(0, "F", 0)] == 2.0
    assert seconds[Action(1, "B", 3)] == 2.0
    found = simulate_measured(lists, seconds)
    nominal = simulate(lists, [StageTime(2, 1, 1), StageTime(1, 1, 1)])
    assert found == nominal
    # One sleep that is longer moves the end by as much if it is on the path.
    seconds[Action(1, "F", 0)] += 0.5
    assert simulate_measured(lists, seconds).makespan == nominal.makespan + 0.5


def test_taking_sleeps_leaves_none() -> None:
    made, x = layer()
    made(x)
    assert [sleep.op for sleep in take_sleeps()] == ["F"]
    assert take_sleeps() == []
