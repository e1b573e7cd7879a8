"""Cutting a batch into microbatches and telling batches apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_pipeline.errors import StepError

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


def num_rows(batch: Any, step: str) -> int:
    """Number of samples in ``batch``: the leading size of its first tensor with a dimension.

    Raises:
        StepError: If the batch holds no such tensor.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0]:
            return int(leaf.shape[0])
    raise StepError(
        f"{step} got a batch without a tensor whose first dim counts samples (its type is "
        f"{type(batch).__name__}), so it cannot be cut into microbatches. Turn it into tensors in "
        "LightningModule.on_after_batch_transfer or in the DataLoader's collate_fn."
    )


def cut_batch(batch: Any, cut: Cut) -> list[Any]:
    """Cuts ``batch`` into ``cut.total`` microbatches.

    Tensors whose first dim counts the samples are sliced (views), and so are lists and tuples of
    plain values of that length; everything else goes whole into every microbatch.
    """
    microbatches, start = [], 0
    for size in cut.sizes:
        microbatches.append(_slice(batch, start, start + size, cut.rows))
        start += size
    fillers = [microbatches[0]] * (cut.total - len(microbatches))
    return microbatches + fillers


def _slice(value: Any, start: int, stop: int, rows: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == rows else value
    if type(value) in (list, tuple):
        plain = value and not any(_holds_tensors(item) for item in value)
        if plain and len(value) == rows:
            return value[start:stop]
        return type(value)(_slice(item, start, stop, rows) for item in value)
    # Any other container that torch knows: dict, named tuple, dataclass, ...
    children, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    if len(children) == 1 and children[0] is value:
        return value
    return pytree.tree_unflatten([_slice(child, start, stop, rows) for child in children], spec)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def checksum(batch: Any) -> int:
    """CRC-32 of sampled elements of every tensor in ``batch``; equal batches give equal numbers."""
    crc = 0
    for shape, samples in _samples(batch):
        crc = zlib.crc32(repr(shape).encode(), crc)
        crc = zlib.crc32(samples.cpu().contiguous().view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _samples(batch: Any) -> Iterator[tuple[torch.Size, Tensor]]:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout == torch.strided:
            flat = leaf.detach().reshape(-1)
            yield leaf.shape, flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
