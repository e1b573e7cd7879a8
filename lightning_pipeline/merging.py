"""What a step made of each microbatch, joined to what it would have made of the whole batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.batch import leaves, parts_of

Place = tuple[Hashable, ...]
"""Names and indices that lead to a value among what a step makes."""


def detached(tree: Any) -> Any:
    """``tree`` with its tensors out of the autograd graph."""
    if isinstance(tree, Tensor):
        return tree.detach()
    parts = parts_of(tree)
    if parts is None or not any(isinstance(leaf, Tensor) for leaf in leaves(tree)):
        return tree
    return parts[1]([detached(child) for child in parts[0]])


def list_place(path: Place, index: int) -> Place:
    """Place of the entry ``index`` that a step appends to the list at ``path``.

    The keys below the attribute may be those of a batch.
    """
    return "lists", path[0], len(path), index


def is_whole(value: Any) -> bool:
    """Whether it is a single whole number."""
    if isinstance(value, Tensor):
        kind = value.dtype
        return value.numel() == 1 and not (kind.is_floating_point or kind == torch.bool)
    return type(value) is int


def whole_numbers(tree: Any, place: Place) -> Iterator[tuple[Place, int | Tensor]]:
    """Whole numbers in ``tree``, single integer tensors among them, with their places."""
    if is_whole(tree) and not getattr(tree, "ndim", 0):
        yield place, tree
    elif not isinstance(tree, Tensor) and (parts := parts_of(tree)) is not None:
        for index, child in enumerate(parts[0]):
            yield from whole_numbers(child, (*place, index))


@dataclass(frozen=True)
class Merger:
    """Joins what a step made of each microbatch.

    Rows are put together: of tensors, of arrays and of lists with an entry a sample. Single
    floating-point numbers are averaged, whole numbers that count something added. What is equal
    everywhere stays itself, and of anything else the list over the microbatches is given.

    Args:
        sizes: Rows of each microbatch, in the batch of each loader.
        shares: What each counts in means; their sum is 1.
        counts: Where there are whole numbers that depend on the microbatch, although they may be
            equal for all of this batch; more are added when they are seen to differ.
        unsure: Where there may be such numbers, which were 0 when the step was surveyed.
        index: Number of the batch, with which such a number may be meant.
    """

    sizes: Sequence[Sequence[int]]
    shares: Sequence[float]
    counts: set[Place]
    unsure: frozenset[Place] = frozenset()
    index: int | None = None

    def __call__(self, values: Sequence[Any], place: Place) -> Any:
        """Joins ``values``, one for each microbatch with rows, found at ``place`` in the step."""
        first = values[0]
        if len(values) == 1:
            return detached(first)
        if any(_is_list_of_rows(values, sizes) for sizes in self.sizes):
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

    def lists(self, values: Sequence[Mapping[Place, list[Any]]]) -> dict[Place, list[Any]]:
        """Joins what a step has appended to lists, entry by entry."""
        paths = dict.fromkeys(path for given in values for path in given)
        return {
            path: self._entries(path, [given.get(path, []) for given in values]) for path in paths
        }

    def _entries(self, path: Place, lists: list[list[Any]]) -> list[Any]:
        if len(set(map(len, lists))) > 1:
            return [entry for entries in lists for entry in entries]
        columns = enumerate(zip(*lists, strict=True))
        return [self(entries, list_place(path, index)) for index, entries in columns]

    def _leaf(self, values: Sequence[Any], place: Place) -> Any:
        first = values[0]
        if all(type(value) is int for value in values):
            return sum(values) if self._counts(values, place) else first
        if all(isinstance(value, Tensor) for value in values):
            return self._tensor([value.detach() for value in values], place)
        if all(isinstance(value, np.ndarray) and value.ndim for value in values):
            return np.concatenate(values) if self._have_rows(values) else list(values)
        if all(isinstance(value, (float, np.floating)) for value in values):
            shares = zip(values, self.shares, strict=True)
            return type(first)(sum(value * share for value, share in shares if share))
        try:
            same = all(value is first or bool(value == first) for value in values)
        except (TypeError, ValueError, RuntimeError):
            same = False
        return first if same else list(values)

    def _tensor(self, values: Sequence[Tensor], place: Place) -> Any:
        first = values[0]
        if first.ndim:
            return torch.cat(list(values)) if self._have_rows(values) else list(values)
        if first.is_floating_point():
            return mean(values, self.shares)
        if first.dtype == torch.bool:
            return first if len(set(_numbers(values))) == 1 else list(values)
        numbers = _numbers(values)
        return first.new_full((), sum(numbers)) if self._counts(numbers, place) else first

    def _have_rows(self, values: Sequence[Any]) -> bool:
        """Whether these have the rows of the microbatches, in the batch of some loader."""
        lengths = [len(value) for value in values]
        return any(lengths == list(sizes) for sizes in self.sizes)

    def _counts(self, values: Sequence[int], place: Place) -> bool:
        differ = len(set(values)) > 1
        if differ or (place in self.unsure and values[0] not in (0, self.index)):
            self.counts.add(place)
        return place in self.counts


def mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Weighted mean; what counts nothing may be NaN."""
    weighted = [v.double() * share for v, share in zip(values, shares, strict=True) if share]
    total = torch.stack(weighted).sum() if weighted else values[0].new_zeros(())
    return total.to(values[0].dtype)


def _numbers(values: Sequence[Tensor]) -> list[Any]:
    """Single values in Python, read from their device at once."""
    numbers: list[Any] = torch.stack(list(values)).tolist()
    return numbers


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


def numbers_in(made: dict[str, Any]) -> dict[Place, int | Tensor]:
    """Whole numbers that a step makes; see :class:`Merger`."""
    found = dict(whole_numbers(made["output"], ("output",)))
    for name, value in made["logs"].items():
        found.update(whole_numbers(value, ("log", name)))
    for name, value in made["attributes"].items():
        found.update(whole_numbers(value, ("attributes", name)))
    for path, entries in made["lists"].items():
        for index, entry in enumerate(entries):
            found.update(whole_numbers(entry, list_place(path, index)))
    return found
