"""Losses over classes that are means over something else than samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lightning_pipeline.batch import leaves
from lightning_pipeline.splitting.torch_private import FakeTensor

_LOSSES: dict[str, Callable[..., Any]] = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}

WEIGHTED = (
    "is a mean weighted by the classes of its targets; return {'loss': loss, 'weight': "
    "w[targets].sum()}, with w the classes' weights and without ignored targets"
)
IGNORING = (
    "is a mean over the targets that are not ignored; return {'loss': loss, 'weight': their number}"
)
SUMMED = (
    "leaves out targets; if it is a mean over those that are not ignored, return {'loss': loss, "
    "'weight': their number}"
)


@dataclass(frozen=True)
class ClassLoss:
    """One loss over classes that a step, or a module in it, takes.

    Attributes:
        ignore_index: The class that it leaves out.
        ignored: bool, shaped like the targets: which are left out. ``None`` if they are made up.
        is_mean: Whether it takes the mean itself.
        is_weighted: Whether its classes have different weights.
    """

    ignore_index: int
    ignored: Tensor | None
    is_mean: bool
    is_weighted: bool

    @classmethod
    def of(
        cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made_up: bool
    ) -> ClassLoss | None:
        """The loss that torch's function ``name`` takes, if it is one.

        Args:
            name: The function's name.
            args: Its arguments.
            kwargs: Its keyword arguments.
            made_up: Whether weights of the model, and so those of classes, may be made up.
        """
        if name not in _LOSSES:
            return None
        bound = inspect.signature(_LOSSES[name]).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        target, weight = given["target"], given["weight"]
        if target.is_floating_point():  # shares of classes: a mean over all
            return None
        unknown = isinstance(target, FakeTensor) or target.is_meta
        return cls(
            given["ignore_index"],
            None if unknown else target.detach() == given["ignore_index"],
            given["reduction"] == "mean",
            weight is not None and (made_up or bool((weight != weight[0]).any())),
        )


def what_it_means(losses: Iterable[ClassLoss], batch: Any, rows: tuple[int, int]) -> str | None:
    """What a step's loss is, if microbatches do not count by their rows; and what to return.

    Samples that all have equally many ignored targets, such as the last one of each sequence, do.

    Args:
        losses: What the step takes on its first microbatch.
        batch: The whole batch.
        rows: Rows of both, the batch's first.
    """
    found = {WEIGHTED for loss in losses if loss.is_mean and loss.is_weighted}
    for loss in losses:
        here = [] if loss.ignored is None else [(loss.ignored, rows[1])]
        # Not all that is ignored in a batch need be in its first microbatch.
        there = [
            (leaf == loss.ignore_index, rows[0])
            for leaf in leaves(batch)
            if isinstance(leaf, Tensor)
            and leaf.ndim
            and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype.itemsize == 1)
        ]
        if any(_is_uneven(ignored, count) for ignored, count in (*here, *there)):
            found.add(IGNORING if loss.is_mean else SUMMED)
    return next((text for text in (WEIGHTED, IGNORING, SUMMED) if text in found), None)


def has_weight(returned: Any) -> bool:
    """Whether a step returns what its loss counts."""
    return isinstance(returned, Mapping) and returned.get("weight") is not None


def _is_uneven(ignored: Tensor, rows: int) -> bool:
    """Whether rows have different numbers of what is ignored."""
    if not rows or ignored.numel() % rows:
        return bool(ignored.any())
    counts = ignored.reshape(rows, -1).sum(1)
    return bool((counts != counts[0]).any())
