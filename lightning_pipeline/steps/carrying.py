"""Attributes that a step reads and then sets anew: state that it carries from batch to batch.

Every microbatch must start from what the batch before left, not from what the microbatch before
left, on every stage. A second survey with another number of rows tells what such a value is: one
that has rows of samples (an LSTM's hidden state) is cut like the batch, a number of samples is
added up, and what does not depend on the batch (a number of batches) is the same for all
microbatches. Anything else, such as a moving average over the batch, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.attributes import ABSENT

_SAME, _COUNT, _AHEAD, _ROWS = "same", "count", "count that is used", "rows"
_QUIET = "did not change"  # and may come to count something that the step reads in tensors
_Kind = int | str
"""Dim of a tensor that counts samples; or what a leaf without samples does."""


@dataclass(frozen=True)
class Observed:
    """An attribute before and after one survey.

    Attributes:
        before: Its value before the step.
        after: Its value behind it, tensors detached.
        made: Whether a tensor in it comes from a module's call.
        reads_values: Whether the step reads tensors into Python.
        reads: How often the step reads it before it first sets it.
        read_again: Whether it reads it after that.
    """

    before: Any
    after: Any
    made: bool
    reads_values: bool
    reads: int
    read_again: bool


@dataclass(frozen=True)
class Carry:
    """How one attribute is dealt out to microbatches and joined again.

    Attributes:
        step: The step that sets it.
        name: Its name on the LightningModule.
        kinds: What each leaf of its value is.
    """

    step: str
    name: str
    kinds: tuple[_Kind, ...]

    @classmethod
    def of(
        cls, step: str, name: str, first: Observed, second: Observed, rows: tuple[int, int]
    ) -> Carry:
        """Compares two surveys.

        Args:
            step: Name of the step.
            name: Name of the attribute.
            first: One survey.
            second: The other.
            rows: The rows of their microbatches, which differ.

        Raises:
            StepError: If the value is none that microbatches can share.
        """
        leaves, spec = pytree.tree_flatten(first.after)
        others, other_spec = pytree.tree_flatten(second.after)
        starts = pytree.tree_leaves(first.before)
        if spec != other_spec:
            raise _refused(step, name)
        if len(starts) != len(leaves):
            starts = [None] * len(leaves)
        seconds = pytree.tree_leaves(second.before)
        if len(seconds) != len(leaves):
            seconds = [None] * len(leaves)
        columns = zip(leaves, others, starts, seconds, strict=True)
        kinds = [_kind(*column, rows, first) for column in columns]
        if None in kinds:
            raise _refused(step, name)
        return cls(step, name, tuple(kind for kind in kinds if kind is not None))

    def cut(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        """What each microbatch starts from.

        Args:
            value: The attribute, as the batch before or a hook left it.
            sizes: Rows of each microbatch.

        Raises:
            StepError: If it has another number of samples than the batch.
        """
        leaves, spec = pytree.tree_flatten(value)
        kinds = self.kinds if len(self.kinds) == len(leaves) else (_SAME,) * len(leaves)
        columns = []
        for leaf, kind in zip(leaves, kinds, strict=True):
            if kind == _AHEAD and type(leaf) is int:
                # The step counts its rows and uses the number, which is that of the whole batch.
                columns.append([leaf + sum(sizes) - size for size in sizes])
                continue
            if isinstance(kind, str) or not isinstance(leaf, Tensor):
                columns.append([leaf] * len(sizes))
                continue
            if leaf.ndim <= kind or leaf.shape[kind] != sum(sizes):
                raise StepError(
                    f"self.{self.name} carries samples from batch to batch along dim {kind}; it "
                    f"has shape {tuple(leaf.shape)}, and the batch {sum(sizes)} samples, so it is "
                    "not clear which ones belong together. Give all batches the same size "
                    "(drop_last=True), or reset the attribute in on_train_batch_start."
                )
            columns.append(list(leaf.split(list(sizes), kind)))
        return [
            pytree.tree_unflatten([column[i] for column in columns], spec)
            for i in range(len(sizes))
        ]

    def join(self, before: Any, values: Sequence[Any]) -> Any:
        """The attribute after the whole batch.

        Args:
            before: Its value before the batch.
            values: What each microbatch has left.

        Raises:
            StepError: If what should not depend on the microbatch does.
        """
        flat = [pytree.tree_flatten(value) for value in values]
        starts = pytree.tree_leaves(before)
        spec = flat[0][1]
        if any(other != spec for _, other in flat) or len(self.kinds) != len(flat[0][0]):
            raise _refused(self.step, self.name)
        joined = []
        for index, kind in enumerate(self.kinds):
            leaves = [leaves[index] for leaves, _ in flat]
            if isinstance(kind, int):
                joined.append(torch.cat(leaves, kind))
            elif kind == _COUNT:
                joined.append(starts[index] + sum(leaf - starts[index] for leaf in leaves))
            elif kind == _ROWS:
                joined.append(sum(leaves))
            elif all(_equal(leaf, leaves[0]) for leaf in leaves) and (
                kind != _QUIET or leaves[0] == starts[index]
            ):
                joined.append(leaves[0])
            else:
                raise _refused(self.step, self.name)
        return pytree.tree_unflatten(joined, spec)


class Carries:
    """All that the steps of a LightningModule carry.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._known: dict[str, Carry] = {}

    def learn(
        self,
        step: str,
        seen: dict[str, Observed],
        again: dict[str, Observed],
        rows: tuple[int, int],
    ) -> None:
        """Notes what a step carries, from two surveys; see :meth:`Carry.of`."""
        for name, first in seen.items():
            if name in self._known:
                continue
            if name not in again:
                raise _refused(step, name)
            self._known[name] = Carry.of(step, name, first, again[name], rows)

    def unknown(self, names: Iterable[str]) -> bool:
        """Whether something of it is not known yet."""
        return any(name not in self._known for name in names)

    def wholes(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of ``names`` that are carried, as the batch before or a hook left them."""
        attributes, kind = self._module.__dict__, type(self._module)
        return {
            name: attributes.get(name, getattr(kind, name, ABSENT))
            for name in names
            if name in self._known
        }

    def starts(self, wholes: dict[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """What each microbatch starts from; see :meth:`Carry.cut`."""
        cut = {name: self._known[name].cut(value, sizes) for name, value in wholes.items()}
        return [{name: values[i] for name, values in cut.items()} for i in range(len(sizes))]

    def likely_starts(self, step: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """As far as it is known what each microbatch starts from before ``step`` is planned."""
        cut = {}
        for name, value in self.wholes(self._known).items():
            try:
                cut[name] = self._known[name].cut(value, sizes)
            except StepError:
                if self._known[name].step == step:
                    raise
                continue  # a step that may not look at it
        return [{name: values[i] for name, values in cut.items()} for i in range(len(sizes))]

    def join(self, wholes: dict[str, Any], given: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The attributes after the whole batch; see :meth:`Carry.join`."""
        return {
            name: self._known[name].join(whole, [values[name] for values in given])
            for name, whole in wholes.items()
            if all(name in values for values in given)
        }


def _kind(
    leaf: Any, other: Any, start: Any, other_start: Any, rows: tuple[int, int], seen: Observed
) -> _Kind | None:
    """What a leaf is, by its values behind two surveys and before them."""
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        shapes = list(zip(leaf.shape, other.shape, strict=False))
        differing = [dim for dim, (a, b) in enumerate(shapes) if a != b]
        if leaf.ndim == other.ndim and len(differing) == 1:
            dim = differing[0]
            return dim if shapes[dim] == rows else None
        return _SAME if not seen.made and _equal(leaf, other) else None
    if all(type(value) is int for value in (leaf, other, start, other_start)):
        added = (leaf - start, other - other_start)
        if added == rows:
            if not seen.read_again:
                return _COUNT
            return _AHEAD if seen.reads == 1 else None
        if (leaf, other) == rows:
            return _ROWS
        if added == (0, 0) and seen.reads_values:
            return _QUIET
        return _SAME if added[0] == added[1] or leaf == other else None
    return _SAME if _equal(leaf, other) else None


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
        return tensors and (
            first is second or (first.shape == second.shape and bool(torch.equal(first, second)))
        )
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second))
    return type(first) is type(second) and (first is second or bool(first == second))


def _refused(step: str, name: str) -> StepError:
    return StepError(
        f"{step} reads self.{name} and then sets it to something that depends on the batch and has "
        "no row a sample, such as a sum or a moving average. A step runs once a microbatch, so "
        "the value over the whole batch is not known in it. Update it in on_train_batch_end (or "
        "on_validation_batch_end) from what the step returns, or use a torchmetrics object; a "
        "count of samples must begin in __init__."
    )
