"""What loaders give: the same batch to each rank, and batches of several loaders at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline import transfers
from lightning_pipeline.batch import (
    Cut,
    checksum_of_host,
    checksum_of_samples,
    cut_batch,
    even_cut,
    leaves,
    num_rows,
    parts_of,
)
from lightning_pipeline.errors import StepError
from lightning_pipeline.lightning_private import combined_loader
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.transfers import Readback


class SameBatch:
    """A comparison of what the ranks of a pipeline begin a step with, under way while they begin.

    What the host knows, such as shapes, is compared before the first message of the step; samples
    of what is on a device, for which that would have to wait, when the step has been launched.

    Args:
        step: Name of the step, for messages.
        batch: This rank's.
        mesh: The rank's place, groups built.
        device: The rank's device.
        changes: Checksum of the changes of what forwards read, and the attribute changed last.
    """

    def __init__(
        self,
        step: str,
        batch: Any,
        mesh: Mesh,
        device: torch.device,
        changes: tuple[int, str] = (0, ""),
    ) -> None:
        self._step, self._mesh, self._last_change = step, mesh, changes[1]
        self._handle: Any = None
        self._samples: list[Readback] = []
        self._is_late = mesh.sizes.pipeline > 1 and not transfers.is_host(device)
        if mesh.sizes.pipeline > 1:
            known, self._samples = checksum_of_host(batch)
            self._handle = self._gather(known, changes[0])

    def _gather(self, *numbers: int) -> Any:
        mark = torch.from_numpy(np.array(numbers))
        self._marks = [torch.empty_like(mark) for _ in self._mesh.pipeline_ranks]
        return dist.all_gather(self._marks, mark, self._mesh.pipeline_group, async_op=True)

    def require(self) -> None:
        """Waits for it; must come before any other message, which might have other shapes.

        Raises:
            StepError: If the batches differ, or the plans would, on every rank.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.wait()
        found = torch.stack(self._marks).tolist()
        if any(settings != found[0][1] for _, settings in found):
            last = f" The last one on this rank was {self._last_change}."
            raise StepError(
                f"{self._step}: attributes that forwards read have changed in another way on each "
                f"rank of the pipeline, so that their plans would differ."
                f"{last if self._last_change else ''} Set them to the same on all ranks, in a hook "
                "that all ranks run."
            )
        self._require_batch([batch_sum for batch_sum, _ in found])

    def require_values(self) -> None:
        """Compares what was on the device; all ranks call it behind :meth:`require`.

        It waits for what the device was given before this comparison began, and no more.

        Raises:
            StepError: If the batches differ, on every rank.
        """
        if self._is_late:
            self._gather(checksum_of_samples(self._samples)).wait()
            self._require_batch(torch.cat(self._marks).tolist())

    def _require_batch(self, found: list[int]) -> None:
        mesh = self._mesh
        sums = dict(zip(mesh.pipeline_ranks, found, strict=True))
        others = sorted(rank for rank, got in sums.items() if got != sums[mesh.last_rank])
        if others:
            other = others[0] if mesh.global_rank not in others else mesh.global_rank
            raise StepError(
                f"{self._step}: rank {other} and rank {mesh.last_rank} of one pipeline got "
                f"different batches (checksums {sums[other]} and {sums[mesh.last_rank]}). All "
                "ranks of a pipeline must draw the same samples: call seed_everything(seed, "
                "workers=True), or make the sampler and the dataset's augmentation deterministic. "
                "Usual causes: a sampler or an IterableDataset that depends on the global rank, "
                "and workers that seed themselves."
            )


Choose = Callable[[int], tuple[int, int]]
"""From a number of rows to that of microbatches with rows, and of all that run."""


def loader_levels(module: LightningModule, batch: Any) -> int:
    """Containers around the batches of the loaders that the running loop draws from at once.

    ``fit(model, {"a": loader, "b": loader})`` has one such level, a single loader none, and so has
    a batch that a hook has made of those of several loaders.
    """
    combined = combined_loader(module.trainer)
    if combined is None:
        return 0
    return _depth(combined.iterables) if _matches(batch, combined.iterables) else 0


def _depth(loaders: Any) -> int:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return 1 + max(map(_depth, loaders), default=0) if isinstance(loaders, (list, tuple)) else 0


def _matches(batch: Any, loaders: Any) -> bool:
    """Whether ``batch`` still has the containers of ``loaders``, one as deep as the other."""
    if isinstance(loaders, Mapping):
        same = isinstance(batch, Mapping) and batch.keys() == loaders.keys()
        return same and all(_matches(batch[name], loaders[name]) for name in loaders)
    if isinstance(loaders, (list, tuple)):
        same = isinstance(batch, (list, tuple)) and len(batch) == len(loaders)
        return same and all(map(_matches, batch, loaders))
    return batch is None or any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves(batch))


def batches_in(batch: Any, levels: int) -> list[Any]:
    """The batches that the loaders gave; one whose loader has ended is ``None`` and left out."""
    if not levels:
        return [] if batch is None else [batch]
    parts = parts_of(batch)
    children = parts[0] if parts else []
    return [found for child in children for found in batches_in(child, levels - 1)]


def choose_cut(batch: Any, step: str, levels: int, choose: Choose, min_rows: int) -> Cut:
    """How the rows of a batch are dealt out.

    Batches of several loaders with unequal rows are cut into so many microbatches that each gets
    the same share of all of them, which keeps any mean over one or all of them exact.

    Args:
        batch: What the step gets.
        step: Name of the step, for messages.
        levels: See :func:`loader_levels`.
        choose: The schedule's choice.
        min_rows: Fewest rows of a microbatch.

    Returns:
        The cut of the first loader's batch, with the sizes of the others.

    Raises:
        StepError: If a batch cannot be cut.
    """
    rows = [num_rows(one, step) for one in batches_in(batch, levels) or [batch]]
    if len(set(rows)) == 1:
        return even_cut(rows[0], *choose(rows[0]))
    common, total = math.gcd(*rows), 0
    for real in range(common, 0, -1):
        chosen, total = choose(real)
        if chosen == real and common % real == 0 and (min(rows) // real >= min_rows or real == 1):
            break
    cut = even_cut(rows[0], real, total)
    others = dict.fromkeys(even_cut(count, real, total).sizes for count in rows[1:])
    return replace(cut, others=tuple(sizes for sizes in others if sizes != cut.sizes))


def cut_together(batch: Any, step: str, levels: int, cut: Cut) -> list[Any]:
    """Cuts what the step gets into ``cut.total`` microbatches, each loader's batch by its rows."""
    if batch is None:
        return [None] * cut.total
    if not levels:
        rows = num_rows(batch, step)
        return cut_batch(batch, even_cut(rows, len(cut.sizes), cut.total))
    parts = parts_of(batch)
    assert parts is not None
    columns = [cut_together(child, step, levels - 1, cut) for child in parts[0]]
    return [parts[1](list(children)) for children in zip(*columns, strict=True)]
