"""Cutting a batch into microbatches and telling batches apart."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting.torch_private import pytree

_SAMPLES = 64


@dataclass(frozen=True)
class Cut:
    """How the rows of one batch are dealt out.

    Attributes:
        sizes: Rows of each microbatch that holds data; they differ by at most one.
        total: Number of microbatches that run; the surplus repeats the first one with weight 0.
    """

    sizes: tuple[int, ...]
    total: int

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def share(self, index: int) -> float:
        """Share of microbatch ``index`` in the batch, 0 for a filler."""
        return self.sizes[index] / self.rows if index < len(self.sizes) else 0.0

    def is_filler(self, index: int) -> bool:
        return index >= len(self.sizes)


def even_cut(rows: int, real: int, total: int) -> Cut:
    """Deals ``rows`` out to ``real`` microbatches as evenly as whole rows allow."""
    base, rest = divmod(rows, real)
    return Cut(tuple(base + (index < rest) for index in range(real)), total)


def _parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Children of a container and what makes a container of them; ``None`` for a leaf."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    if len(children) != 1 or children[0] is not value:
        return children, lambda new: pytree.tree_unflatten(new, spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data: Any = value
        names = [field.name for field in dataclasses.fields(data) if field.init]
        return [getattr(data, name) for name in names], lambda new: dataclasses.replace(
            data, **dict(zip(names, new, strict=True))
        )
    if isinstance(value, MutableMapping):
        return list(value.values()), lambda new: _with_values(value, new)
    return None


def _with_values(mapping: MutableMapping[Any, Any], values: list[Any]) -> Any:
    """A mapping of a kind that torch does not know, such as a tokenizer's output."""
    new = copy.copy(mapping)
    for key, value in zip(mapping, values, strict=True):
        new[key] = value
    return new


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in ``batch`` that is no container, depth first."""
    parts = _parts(batch)
    if parts is None:
        yield batch
    else:
        for child in parts[0]:
            yield from leaves(child)


def copied(batch: Any) -> Any:
    """``batch`` with every tensor cloned, so that a step may write to it."""
    parts = _parts(batch)
    if parts is not None:
        return parts[1]([copied(child) for child in parts[0]])
    return batch.detach().clone() if isinstance(batch, Tensor) else batch


def _is_list_of_samples(value: Any, top: bool) -> bool:
    """Whether a list holds one entry a sample, as collate functions for images of all sizes make.

    A list inside the batch of dicts, or of tensors that do not stack, is one; a list of tensors of
    one shape may as well be several inputs and is not.
    """
    if top or type(value) is not list or not value:
        return False
    if all(isinstance(item, Mapping) for item in value):
        return True
    shapes = {tuple(item.shape) for item in value if isinstance(item, Tensor)}
    return len(shapes) > 1 and all(isinstance(item, Tensor) for item in value)


def _votes(value: Any, top: bool = True) -> Iterator[tuple[str, int]]:
    """Kind and size of everything that may count the samples."""
    if _is_list_of_samples(value, top):
        yield "samples", len(value)
    elif isinstance(value, Tensor):
        if value.ndim and value.shape[0]:
            yield "tensors", int(value.shape[0])
    elif type(value) in (list, tuple) and value and not any(map(_holds_tensors, value)):
        yield "values", len(value)
    elif (parts := _parts(value)) is not None:
        for child in parts[0]:
            yield from _votes(child, top=False)


def num_rows(batch: Any, step: str) -> int:
    """Number of samples in ``batch``: the leading size that most of its tensors share.

    Raises:
        StepError: If nothing counts samples, or two sizes are equally frequent.
    """
    votes = list(_votes(batch))
    for kind in ("samples", "tensors", "values"):
        sizes = Counter(size for voted, size in votes if voted == kind).most_common(2)
        if len(sizes) == 2 and sizes[0][1] == sizes[1][1]:
            raise StepError(
                f"{step} got a batch in which {sizes[0][0]} and {sizes[1][0]} are equally frequent "
                "as first dim, so it is not clear which one counts the samples and is cut into "
                "microbatches. Bring the samples to the first dim of every tensor, and what is no "
                "sample into the LightningModule, in on_after_batch_transfer or the collate_fn."
            )
        if sizes:
            return sizes[0][0]
    raise StepError(
        f"{step} got a batch without a tensor whose first dim counts samples (its type is "
        f"{type(batch).__name__}), so it cannot be cut into microbatches. Turn it into tensors in "
        "LightningModule.on_after_batch_transfer or in the DataLoader's collate_fn."
    )


def cut_batch(batch: Any, cut: Cut) -> list[Any]:
    """Cuts ``batch`` into ``cut.total`` microbatches.

    Tensors whose first dim counts the samples are sliced (views), and so are lists of samples and
    lists and tuples of plain values of that length; everything else goes whole into every
    microbatch.
    """
    microbatches, start = [], 0
    for size in cut.sizes:
        microbatches.append(_slice(batch, start, start + size, cut.rows))
        start += size
    fillers = [microbatches[0]] * (cut.total - len(microbatches))
    return microbatches + fillers


def _slice(value: Any, start: int, stop: int, rows: int, top: bool = True) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == rows else value
    counts = type(value) in (list, tuple) and len(value) == rows
    if counts and (_is_list_of_samples(value, top) or not any(map(_holds_tensors, value))):
        return value[start:stop]
    parts = _parts(value)
    if parts is None:
        return value
    return parts[1]([_slice(child, start, stop, rows, top=False) for child in parts[0]])


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves(value))


def signature(batch: Any) -> Hashable:
    """Shapes, dtypes and structure of a microbatch; plain values may differ."""
    parts = _parts(batch)
    if parts is not None:
        keys = tuple(batch) if isinstance(batch, Mapping) else ()
        return batch.__class__, keys, tuple(signature(child) for child in parts[0])
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    return (batch.__class__,)


def checksum(batch: Any) -> int:
    """CRC-32 of sampled elements of every tensor in ``batch``; equal batches give equal numbers."""
    crc = 0
    for shape, samples in _samples(batch):
        crc = zlib.crc32(repr(shape).encode(), crc)
        crc = zlib.crc32(samples.cpu().contiguous().view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _samples(batch: Any) -> Iterator[tuple[torch.Size, Tensor]]:
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout == torch.strided:
            flat = leaf.detach().reshape(-1)
            yield leaf.shape, flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
