"""Any model of the zoo as a LightningModule, and the batches that it is trained with."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from tests.models.registry import Arguments, Model

RATES = ("p", "dropout", "dropout_p", "drop_prob")
"""Attributes of modules that are the share of something to drop."""
MICROBATCHES = 4
STEPS = 4


def drop_nothing(model: nn.Module) -> None:
    """Sets all rates of dropout to 0: its random numbers are others in a pipeline."""
    for module in model.modules():
        for name in RATES:
            if type(getattr(module, name, None)) is float:
                setattr(module, name, 0.0)


def mean_loss(out: Any) -> Tensor:
    """The loss that a model returns by this name, or one of everything that it returns.

    Single numbers are taken for means over the samples, of everything else the mean is taken.
    """
    if getattr(out, "loss", None) is not None:
        return out.loss
    out = vars(out) if dataclasses.is_dataclass(out) and not isinstance(out, dict) else out
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    floating = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return sum(
        (leaf.sin().mean() if leaf.ndim else leaf) for leaf in floating if leaf.is_floating_point()
    )  # type: ignore[return-value]


class Stepped(L.LightningModule):
    """One call of the model a step."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model.build()
        drop_nothing(self.model)

    def training_step(self, batch: Arguments, batch_idx: int) -> Tensor:
        args, kwargs = batch
        loss = mean_loss(self.model(*args, **kwargs))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Arguments, batch_idx: int) -> None:
        args, kwargs = batch
        self.log("val_loss", mean_loss(self.model(*args, **kwargs)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


def sizes_of(model: Model) -> list[tuple[int, int]]:
    """Rows and lengths; microbatches that see each other's numbers have to be equally large."""
    if model.separable:
        return list(model.sizes)
    rows = itertools.cycle((2 * MICROBATCHES, 3 * MICROBATCHES))
    return [(count, length) for count, (_, length) in zip(rows, model.sizes, strict=False)]


def microbatches(batch: Arguments, rows: int) -> list[Arguments]:
    """A batch in equal parts, tensors by their first dim."""
    size = rows // MICROBATCHES

    def part(start: int) -> Arguments:
        def take(leaf: Any) -> Any:
            cut = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
            return leaf[start : start + size] if cut else leaf

        return pytree.tree_map(take, batch)

    return [part(start) for start in range(0, rows, size)]


def loaders(model: Model, whole: bool) -> tuple[DataLoader, DataLoader]:
    """Loaders of batches of all sizes, in training and in validation.

    Args:
        model: The model.
        whole: Whether to give whole batches, or their microbatches one by one.
    """
    sizes = sizes_of(model)
    training = list(itertools.islice(itertools.cycle(sizes), STEPS))

    def loader(sizes: list[tuple[int, int]], seed: int) -> DataLoader:
        batches = []
        for index, (rows, length) in enumerate(sizes):
            batch = model.arguments(rows, length, seed=seed + index)
            batches += [batch] if whole else microbatches(batch, rows)
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    return loader(training, 10), loader(sizes[::-1], 20)
