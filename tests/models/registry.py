"""What the tests know of a model: how to make it, its arguments, and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """How to make a model and its arguments.

    Attributes:
        make: Makes the model.
        inputs: Makes the arguments for a batch size and a length (or image size).
        sizes: Batch size and length pairs; the first is the one that it is placed with.
        dtype: Precision of the comparison.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Arguments]
    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float64


ZOO: dict[str, Model] = {}


def images(batch: int, size: int) -> Arguments:
    return (torch.randn(batch, 3, size, size),), {}


def vectors(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, WIDTH),), {}


def sequences(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {}


def register(
    inputs: Callable[[int, int], Arguments] = sequences,
    sizes: tuple[tuple[int, int], ...] = ((4, 8), (3, 5)),
    dtype: torch.dtype = torch.float64,
) -> Callable[[Any], Any]:
    """Put a class or a function that makes a model into the zoo."""

    def add(make: Any) -> Any:
        ZOO[make.__name__] = Model(make, inputs, sizes, dtype)
        return make

    return add


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Chain(nn.Module):
    """Layers one after another; the awkward models change what runs between them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x
