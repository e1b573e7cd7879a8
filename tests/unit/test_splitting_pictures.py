"""What a recording sees of the objects that modules lead to: every change, at little cost."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.splitting import pictures, record
from lightning_pipeline.splitting.pictures import Change, Picture


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


class Slotted:
    __slots__ = ("number", "unset")

    def __init__(self) -> None:
        self.number = 1


class Counts(dict):
    """A class of dicts of the user's own."""


class Owner(nn.Module):
    """Leads to one object of each kind."""

    shared: ClassVar[dict[str, int]] = {"calls": 0}
    number: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        big = 10**6
        self.first, self.second, self.empty = [big, big + 1], [big + 2, big + 3], []
        self.table: dict[Any, Any] = {"a": big, 7: [1]}
        self.table2: dict[Any, Any] = {}
        self.members, self.queue = {1, 2}, deque([1, 2])
        self.plain: Any = Plain(big)
        self.plain.inner = Plain(1)
        self.slotted, self.ordered, self.counts = Slotted(), OrderedDict(a=1), Counts(a=1)
        self.pair = (1, [2])
        self.array, self.python = np.arange(3), random.Random(0)
        self.numpy, self.torch = np.random.default_rng(0), torch.Generator()
        self.hidden = [nn.Linear(1, 1)]
        cell = 0

        def count() -> int:
            nonlocal cell
            cell += 1
            return cell

        self.count = count
        self.later: Callable[..., Any] = lambda: unset  # noqa: F821


CHANGES: dict[str, Callable[[Owner], Any]] = {
    "an entry is appended": lambda o: o.first.append(1),
    "an entry is replaced": lambda o: o.first.__setitem__(0, 5),
    "an entry is removed": lambda o: o.first.pop(),
    "entries change places": lambda o: o.first.reverse(),
    "an entry goes to the next list": lambda o: o.second.insert(0, o.first.pop()),
    "an entry goes to an empty list": lambda o: o.empty.append(o.second.pop()),
    "an entry of a dict": lambda o: o.table.__setitem__("a", 5),
    "a new key": lambda o: o.table.__setitem__("b", 5),
    "a key less": lambda o: o.table.pop("a"),
    "a key goes to the next dict": lambda o: o.table2.update([o.table.popitem()]),
    "a list inside a dict": lambda o: o.table[7].append(1),
    "a list inside a tuple": lambda o: o.pair[1].append(1),
    "a set": lambda o: o.members.add(3),
    "a queue": lambda o: o.queue.rotate(),
    "an attribute": lambda o: setattr(o.plain, "number", 5),
    "an attribute of an attribute": lambda o: setattr(o.plain.inner, "number", 5),
    "a new attribute": lambda o: setattr(o.plain, "other", 5),
    "an attribute less": lambda o: delattr(o.plain, "number"),
    "all attributes": lambda o: setattr(o.plain, "__dict__", {"number": 3}),
    "a slot": lambda o: setattr(o.slotted, "number", 5),
    "a slot that was empty": lambda o: setattr(o.slotted, "unset", 5),
    "an ordered dict": lambda o: o.ordered.__setitem__("a", 5),
    "a dict of a class of its own": lambda o: o.counts.__setitem__("a", 5),
    "an attribute of such a dict": lambda o: setattr(o.counts, "other", 5),
    "an attribute of the class": lambda o: setattr(type(o), "number", 5),
    "an object of the class": lambda o: o.shared.__setitem__("calls", 5),
    "a variable of a closure": lambda o: o.count(),
    "an attribute of a function": lambda o: setattr(o.count, "calls", 5),
    "an array": lambda o: o.array.__setitem__(0, 5),
    "Python's generator": lambda o: o.python.random(),
    "NumPy's generator": lambda o: o.numpy.random(),
    "torch's generator": lambda o: torch.rand(1, generator=o.torch),
    "a module in a list": lambda o: setattr(o.hidden[0], "other", 5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_once(name: str) -> None:
    owner = Owner()
    before = Picture([("owner", owner)])
    below = before.below()
    assert not below.changes()
    CHANGES[name](owner)
    try:
        found = [_summary(change) for change in below.changes()]
        assert found and found == [_summary(change) for change in before.changes()]
        assert not below.changes()
    finally:
        before.restore()
    assert [_summary(change) for change in below.changes()]
    assert not before.changes()


def _summary(change: Change) -> tuple[Any, ...]:
    return change.module, change.attribute, id(change.holder), change.key


def test_an_equal_value_is_no_change() -> None:
    owner = Owner()
    below = Picture([("owner", owner)]).below()
    owner.first[0] = int("1000000")
    owner.plain.number = int("1000000")
    owner.table[7] = [1]
    assert not below.changes()


def test_modules_themselves_and_their_hooks_are_left_out() -> None:
    owner = Owner()
    below = Picture([("owner", owner)]).below()
    owner.register_forward_hook(lambda *_: None)
    owner.number = 5
    assert not below.changes()


class Layer(nn.Module):
    """A layer with a setting that could change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.sizes = nn.Linear(2, 2), [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.sizes[0]


def test_looking_for_changes_is_linear_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    content, looks = pictures._content, [0]

    def counted(holder: Any) -> Any:
        looks[0] += 1
        return content(holder)

    monkeypatch.setattr(pictures, "_content", counted)
    found = []
    for count in (8, 16):
        looks[0] = 0
        layers = nn.Sequential(*[Layer() for _ in range(count)])
        record(layers, (torch.zeros(1, 2),), {}, num_stages=count)
        found.append(looks[0])
    assert found[1] <= 2 * found[0]
