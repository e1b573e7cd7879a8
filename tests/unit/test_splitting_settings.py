"""Values are compared by what is in them, and attributes of modules whatever way they are read."""

from __future__ import annotations

import enum
import functools
import gc
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipeline.splitting.settings import frozen
from lightning_pipeline.splitting.watch import ABSENT, Watch


class Color(enum.Enum):
    RED, BLUE = 1, 2


@dataclass
class Point:
    x: Any = 0


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Text(str):
    pass


def function(default: Any = 1, *, keyword: Any = 1) -> Any:
    return default, keyword


def closure(value: Any) -> Any:
    return lambda: value


def loop(value: Any) -> list[Any]:
    made: list[Any] = [value]
    made.append(made)
    return made


EQUAL = [
    lambda: None,
    lambda: float("nan"),
    lambda: (1, "a", b"a", 2.5, 1j, torch.float32, torch.device("cpu"), torch.Size([1])),
    lambda: [{"a": [1, {2}]}, deque([1]), frozenset("abc"), range(3), slice(1, 2)],
    lambda: OrderedDict(a=1),
    lambda: MappingProxyType({"a": Point(1)}),
    lambda: np.arange(5000.0),
    lambda: np.array([Point(1), None]),
    lambda: np.float32(1),
    lambda: Color.RED,
    lambda: SimpleNamespace(a=Point(Slotted(1))),
    lambda: functools.partial(function, [1], keyword={}),
    lambda: Path("a"),
    lambda: Text("a"),
    lambda: loop(1),
    lambda: function,
    lambda: torch.nn.functional.gelu,
]

DIFFERENT = [
    (True, 1),
    (1, 1.0),
    (0.0, -0.0),
    ("1", 1),
    (None, 0),
    ([1], (1,)),
    ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    ({1, 2}, {1, 3}),
    (OrderedDict(a=1), {"a": 1}),
    (np.zeros(2), np.zeros(3)),
    (np.zeros(2), np.zeros(2, np.float32)),
    (np.zeros(5000), np.r_[np.zeros(4999), 1]),
    (np.array([Point(1)]), np.array([Point(2)])),
    (np.float32(1), np.float32(2)),
    (Color.RED, Color.BLUE),
    (Point(1), Point(2)),
    (Slotted(1), Slotted(2)),
    (SimpleNamespace(a=Point([1])), SimpleNamespace(a=Point([2]))),
    (functools.partial(function, 1), functools.partial(function, 2)),
    (closure(1), closure(1)),
    (Text("a"), Text("b")),
    (loop(1), loop(2)),
    (torch.ones(1), torch.ones(1)),
    (nn.Tanh(), nn.Tanh()),
    (object(), object()),
    (torch.float32, torch.float64),
    (slice(1), slice(2)),
]


@pytest.mark.parametrize("number", range(len(EQUAL)))
def test_equal_values_are_equal(number: int) -> None:
    first, second = frozen(EQUAL[number]()), frozen(EQUAL[number]())
    assert first == second and repr(first) == repr(second)


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_different_values_differ(number: int) -> None:
    first, second = DIFFERENT[number]
    assert frozen(first) != frozen(second)
    assert frozen(first) == frozen(first) and frozen(second) == frozen(second)


def test_functions_are_compared_with_their_defaults_and_closures() -> None:
    cell = [1]
    made = closure(cell)
    before = frozen(made)
    cell.append(2)
    assert frozen(made) != before
    before = frozen(function)
    function.__defaults__ = (2,)
    assert frozen(function) != before
    function.__defaults__ = (1,)
    assert frozen(function) == before
    method, point = Point.__eq__, Point(1)
    before = frozen(method.__get__(point))
    point.x = 2
    assert frozen(method.__get__(point)) != before


def test_tensors_are_compared_by_identity_and_version() -> None:
    tensor, parameter = torch.zeros(2), nn.Parameter(torch.zeros(2))
    before, of_parameter = frozen([tensor]), frozen(parameter)
    tensor += 1
    with torch.no_grad():
        parameter += 1
    assert frozen([tensor]) != before and frozen(parameter) == of_parameter


def test_memory_that_is_used_again_is_no_old_object() -> None:
    before = frozen(nn.Tanh())
    gc.collect()
    assert all(frozen(nn.Tanh()) != before for _ in range(20))


def test_what_nobody_sets_is_not_looked_into() -> None:
    import logging
    import threading

    for value in (logging.getLogger("a"), threading.Lock(), torch.Generator(), np):
        assert frozen(value) == frozen(value) and "0x" not in repr(frozen(value))


class Net(nn.Module):
    kind = 1

    def __init__(self) -> None:
        super().__init__()
        self.k, self.config = 1, SimpleNamespace(k=1)
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Tanh()])
        self.register_buffer("state", None)

    @property
    def twice(self) -> int:
        return 2 * self.k

    def forward(self) -> int:
        return self.k


PLACES = [
    ("", "k"),
    ("", "kind"),
    ("", "twice"),
    ("", "config"),
    ("", "state"),
    ("", "forward"),
    ("", "layers"),
    ("", "missing"),
    ("layers", "_modules"),
    ("layers.1", "_forward_hooks"),
    ("layers.0", "bias"),
]


def hook(module: nn.Module, args: Any, out: Any) -> None:
    pass


CHANGES = {
    "number": (lambda net: setattr(net, "k", 2), {("", "k"), ("", "twice")}),
    "same number": (lambda net: setattr(net, "k", int("1")), set()),
    "other type": (lambda net: setattr(net, "k", True), {("", "k")}),
    "class": (lambda net: setattr(type(net), "kind", 2), {("", "kind")}),
    "hides the class": (lambda net: setattr(net, "kind", 2), {("", "kind")}),
    "object": (lambda net: setattr(net.config, "k", 2), {("", "config")}),
    "equal object": (lambda net: setattr(net, "config", SimpleNamespace(k=1)), set()),
    "buffer": (lambda net: setattr(net, "state", torch.ones(1)), {("", "state")}),
    "forward": (lambda net: setattr(net, "forward", len), {("", "forward")}),
    "child": (lambda net: setattr(net, "layers", nn.ModuleList()), None),
    "added": (lambda net: net.layers.append(nn.Tanh()), {("layers", "_modules")}),
    "swapped": (lambda net: setattr(net.layers, "1", nn.Tanh()), {("layers", "_modules")}),
    "hook": (
        lambda net: net.layers[1].register_forward_hook(hook),
        {("layers.1", "_forward_hooks")},
    ),
    "comes": (lambda net: setattr(net, "missing", None), {("", "missing")}),
    "goes": (lambda net: delattr(net, "k"), {("", "k"), ("", "twice")}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_watch(name: str) -> None:
    class Own(Net):
        pass

    change, expected = CHANGES[name]
    net = Own()
    watch = Watch(net, PLACES)
    first, values = watch.look(), watch.values
    assert watch.look() == first and values["", "missing"] == frozen(ABSENT)
    change(net)
    now = watch.look()
    changed = {place for place in PLACES if watch.values[place] != values[place]}
    assert (now != first) == bool(changed) and watch.look() == now
    assert expected is None or changed == expected


def test_a_child_that_passes_to_the_next_container_is_seen() -> None:
    net = nn.ModuleDict({"a": nn.ModuleDict({"x": nn.ReLU()}), "b": nn.ModuleDict()})
    watch = Watch(net, [("a", "_modules"), ("b", "_modules")])
    before = watch.look()
    assert watch.look() == before
    net["b"]["x"] = net["a"].pop("x")
    assert watch.look() != before
