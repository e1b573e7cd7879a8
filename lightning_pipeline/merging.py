"""What a step made of each microbatch, joined to what it would have made of the whole batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.batch import leaves, parts_of
from lightning_pipeline.splitting.torch_private import pytree

Place = tuple[Hashable, ...]
"""Names and indices that lead to a value among what a step makes."""


def detached(tree: Any) -> Any:
    """``tree`` with its tensors out of the autograd graph."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


@dataclass(frozen=True)
class Merger:
    """Joins what a step made of each microbatch.

    Rows are put together: of tensors, of arrays and of lists with an entry a sample. Single
    floating-point numbers are averaged, numbers of samples added. What is equal everywhere stays
    itself, and of anything else the list over the microbatches is given.

    Args:
        sizes: Rows of each microbatch.
        shares: What each counts in means; their sum is 1.
        constants: Where earlier batches had whole numbers that do not count samples; such a number
            may be equal to the rows of a microbatch by chance.
    """

    sizes: Sequence[int]
    shares: Sequence[float]
    constants: set[Place]

    def __call__(self, values: Sequence[Any], place: Place = ()) -> Any:
        """Joins ``values``, one for each microbatch with rows, found at ``place`` in the step."""
        first = values[0]
        if len(values) == 1:
            return detached(first)
        if _is_list_of_rows(values, self.sizes):
            return [entry for value in values for entry in value]
        if isinstance(first, Tensor) or (parts := parts_of(first)) is None:
            return self._leaf(values, place)
        children = [parts[0], *((parts_of(value) or ([], None))[0] for value in values[1:])]
        if any(_kind(v) != _kind(first) for v in values) or len(set(map(len, children))) > 1:
            return list(values)
        columns = enumerate(zip(*children, strict=True))
        return parts[1]([self(column, (*place, index)) for index, column in columns])

    def attributes(self, values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Joins what a step has set; what not every microbatch sets keeps its last value."""
        names = dict.fromkeys(name for given in values for name in given)
        return {
            name: self([given[name] for given in values], ("attributes", name))
            if all(name in given for given in values)
            else next(given[name] for given in reversed(values) if name in given)
            for name in names
        }

    def lists(self, values: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
        """Joins what a step has appended to lists, entry by entry."""
        names = dict.fromkeys(name for given in values for name in given)
        return {
            name: self._entries(name, [given.get(name, []) for given in values]) for name in names
        }

    def _entries(self, name: str, lists: list[list[Any]]) -> list[Any]:
        if len(set(map(len, lists))) > 1:
            return [entry for entries in lists for entry in entries]
        columns = enumerate(zip(*lists, strict=True))
        return [self(entries, ("lists", name, index)) for index, entries in columns]

    def _leaf(self, values: Sequence[Any], place: Place) -> Any:
        first = values[0]
        if all(isinstance(value, Tensor) for value in values):
            tensors = [value.detach() for value in values]
            if first.ndim and _have_rows(tensors, self.sizes):
                return torch.cat(tensors)
            single = not first.ndim and first.is_floating_point()
            return mean(tensors, self.shares) if single else tensors
        if all(isinstance(value, np.ndarray) and value.ndim for value in values):
            return np.concatenate(values) if _have_rows(values, self.sizes) else list(values)
        if all(isinstance(value, (float, np.floating)) for value in values):
            shares = zip(values, self.shares, strict=True)
            return type(first)(sum(value * share for value, share in shares if share))
        if all(type(value) is int for value in values):
            if list(values) != list(self.sizes):
                self.constants.add(place)
            elif place not in self.constants:
                return sum(self.sizes)
        try:
            same = all(value is first or bool(value == first) for value in values)
        except (TypeError, ValueError, RuntimeError):
            same = False
        return first if same else list(values)


def mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Weighted mean; what counts nothing may be NaN."""
    weighted = [v.double() * share for v, share in zip(values, shares, strict=True) if share]
    total = torch.stack(weighted).sum() if weighted else values[0].new_zeros(())
    return total.to(values[0].dtype)


def _kind(value: Any) -> Any:
    return type(value), tuple(value) if isinstance(value, Mapping) else None


def _is_list_of_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether these are lists with an entry a sample, such as decoded texts.

    A list of tensors that have rows themselves is a list of columns; so is a list of numbers that
    happens to be as long as its microbatch has rows only where all microbatches have one row.
    """
    if any(type(v) is not list or len(v) != n for v, n in zip(values, sizes, strict=True)):
        return False
    if max(sizes) == 1 and any(isinstance(v[0], (Tensor, float)) for v in values):
        return False
    return not any(
        isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim and len(leaf) == n
        for value, n in zip(values, sizes, strict=True)
        for leaf in leaves(value)
    )


def _have_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(len(value) == n for value, n in zip(values, sizes, strict=True))
