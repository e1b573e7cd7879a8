"""Dataclasses with tensors are trees, whatever their kind; those without stay objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_pipeline.splitting.objects import open_dataclasses


@dataclass
class Plain:
    x: Tensor
    name: str = "a"


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass(slots=True)
class Slots:
    x: Tensor
    more: list[Tensor] = field(default_factory=list)


@dataclass
class Changes:
    """Its initialisation is not a copy."""

    x: Tensor
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x = self.x + 1
        self.twice = 2 * self.x


@dataclass
class Nested:
    inner: Plain
    count: int = 3


@dataclass
class Settings:
    width: int = 3


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "made", [Plain(ONE), Frozen(ONE), Slots(ONE, [ONE]), Changes(ONE), Nested(Plain(ONE, "b"))]
)
def test_taken_apart_and_put_together(made: Any) -> None:
    open_dataclasses({"out": (made, 1)})
    leaves, spec = pytree.tree_flatten(made)
    assert any(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(made) and repr(again) == repr(made)
    assert pytree.tree_structure(again) == spec
    open_dataclasses(made)  # once is enough


def test_without_tensors_it_is_one_object() -> None:
    settings = Settings()
    open_dataclasses(settings)
    assert pytree.tree_leaves(settings) == [settings]
