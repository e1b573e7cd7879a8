"""Calls of a metric in all microbatches, joined to the one that the whole batch would make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.batch import leaves
from lightning_pipeline.splitting.torch_private import pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_APART = object()


def in_order(sequences: Sequence[Sequence[int]]) -> list[int]:
    """All numbers of ``sequences``, each behind those that it follows in one of them."""
    order: list[int] = []
    for sequence in sequences:
        place = 0
        for number in sequence:
            if number in order:
                place = order.index(number) + 1
            else:
                order.insert(place, number)
                place += 1
    return order


def joined(
    calls: Sequence[Call], rows: Sequence[int], others: Sequence[Sequence[int]] = ()
) -> Call | None:
    """One call over all microbatches that made it; ``None`` if there is no such thing.

    Rows are put together: those of tensors, arrays and lists of samples, if all that a microbatch
    gave have one common length (a selection of its samples, say) or a multiple of its samples each
    (tokens). What is the same object or equal everywhere stays itself, numbers of samples are
    added and other floating-point numbers averaged by samples.

    Args:
        calls: The arguments in each microbatch.
        rows: Samples of each of them.
        others: Samples of other loaders in each of them.
    """
    if len(calls) == 1:
        return calls[0]
    if _are_weighted(calls):
        return None
    flat = [
        pytree.tree_flatten(call, is_leaf=_Rows(n)) for call, n in zip(calls, rows, strict=True)
    ]
    if any(spec != flat[0][1] for _, spec in flat):
        return None
    columns = list(zip(*(values for values, _ in flat), strict=True))
    stacked = [c for c in columns if all(map(_has_rows, c)) and not _is_one_object(c)]
    lengths = _common_lengths(stacked)
    if lengths is None:
        stacked = [column for column in stacked if not _are_equal(column)]
        lengths = _common_lengths(stacked)
    # Beside rows a 1 is what each of them counts, not the number of a microbatch's samples.
    counts = [count for count in (rows, *others) if not stacked or max(count) > 1]
    made = [
        _put_together(column, rows, lengths is not None)
        if any(column is one for one in stacked)
        else _single(column, rows, counts)
        for column in columns
    ]
    if any(value is _APART for value in made):
        return None
    call: Call = pytree.tree_unflatten(made, flat[0][1])
    return call


def _are_weighted(calls: Sequence[Call]) -> bool:
    """Whether each microbatch says what its value counts, in fractions of no known whole."""
    if not any("weight" in call[1] for call in calls):
        return False
    weights = [torch.as_tensor(call[1].get("weight", 1)) for call in calls]
    single = all(weight.numel() == 1 and weight.is_floating_point() for weight in weights)
    return single and len({weight.item() for weight in weights}) > 1


class _Rows:
    """Tells :mod:`pytree` that a list of samples is one argument.

    Texts, dicts of one sample each, or as many tensors without rows of their own as the microbatch
    has samples are such a list; a list of other tensors holds several arguments.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __call__(self, value: Any) -> bool:
        if type(value) is not list:
            return False
        if value and all(isinstance(item, dict) for item in value):
            return True
        inside = [leaf for leaf in leaves(value) if isinstance(leaf, (Tensor, np.ndarray))]
        if not inside:
            return True
        return len(value) == self._rows and all(not x.ndim or len(x) != len(value) for x in inside)


def _has_rows(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return bool(value.ndim)
    return type(value) is list


def _is_one_object(values: tuple[Any, ...]) -> bool:
    """Whether all microbatches gave the same memory, such as a buffer; they cut the batch's."""
    first = values[0]
    if isinstance(first, Tensor) and first.numel():
        places = {
            (v.data_ptr(), v.shape, v.stride()) if isinstance(v, Tensor) else None for v in values
        }
        return len(places) == 1
    return all(value is first for value in values)


def _common_lengths(columns: list[tuple[Any, ...]]) -> list[int] | None:
    """Length of all arguments with rows in each microbatch; ``None`` if they differ in one."""
    lengths = [{len(value) for value in values} for values in zip(*columns, strict=True)]
    if not lengths or any(len(found) > 1 for found in lengths):
        return None
    return [found.pop() for found in lengths]


def _put_together(values: tuple[Any, ...], rows: Sequence[int], common: bool) -> Any:
    """The rows of one argument."""
    first = values[0]
    if not common and any(len(value) % n for value, n in zip(values, rows, strict=True)):
        return _APART
    if any(type(value) is not type(first) for value in values):
        return _APART
    if type(first) is list:
        return [entry for value in values for entry in value]
    filled = [value for value in values if len(value)] or [first]
    if any(value.shape[1:] != filled[0].shape[1:] for value in filled):
        return _APART
    return torch.cat(filled) if isinstance(first, Tensor) else np.concatenate(filled)


def _single(values: tuple[Any, ...], rows: Sequence[int], counts: Sequence[Sequence[int]]) -> Any:
    """An argument without rows."""
    first = values[0]
    if all(isinstance(v, Tensor) and not v.ndim and v.is_floating_point() for v in values):
        weighted = [v.double() * w for v, w in zip(values, rows, strict=True)]
        return (sum(weighted) / sum(rows)).to(first.dtype)
    numbers = [v.item() if isinstance(v, Tensor) and not v.ndim else v for v in values]
    if all(type(number) is int for number in numbers):
        if any(numbers == list(count) for count in counts):
            return sum(numbers) if isinstance(first, int) else first.new_tensor(sum(numbers))
    elif all(type(number) is float for number in numbers):
        mean = sum(n * w for n, w in zip(numbers, rows, strict=True)) / sum(rows)
        return mean if isinstance(first, float) else first.new_tensor(mean)
    return first if _are_equal(values) else _APART


def _are_equal(values: tuple[Any, ...]) -> bool:
    first = values[0]
    try:
        if isinstance(first, Tensor):
            return all(torch.equal(first, value) for value in values)
        if isinstance(first, np.ndarray):
            return all(np.array_equal(first, value) for value in values)
        return all(bool(value == first) for value in values)
    except (TypeError, ValueError, RuntimeError):
        return False
