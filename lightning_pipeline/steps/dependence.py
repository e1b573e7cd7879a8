"""Gradients that a step asks for in some batches only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_pipeline.boundary import leaves_of
from lightning_pipeline.errors import StepError
from lightning_pipeline.steps.call import SAME_DEPENDENCE, Call
from lightning_pipeline.steps.pending import tensors


@dataclass
class Undone:
    """Answers of one run of a step whose gradient nobody sends back.

    The loss of the batch that the step was planned with did not depend on them through autograd.
    """

    _leaves: dict[int, tuple[Tensor, str]] = field(default_factory=dict)

    def replace(self, call: Call, results: dict[int, Tensor]) -> dict[int, Tensor]:
        """``results``, with leaves of the step's graph in place of those without a gradient."""
        if not call.dropped:
            return results
        replaced = dict(results)
        for position in call.dropped & results.keys():
            leaf = results[position].detach().requires_grad_(True)
            self._leaves[id(leaf)] = leaf, call.label
            replaced[position] = leaf
        return replaced

    def check(self, step: str, tree: Any) -> None:
        """Refuses what depends on them now.

        Args:
            step: Name of the step.
            tree: What it returned, or the arguments of a call that trains.

        Raises:
            StepError: Naming the call whose gradient would be lost.
        """
        if not self._leaves:
            return
        tree = tree.get("loss") if isinstance(tree, Mapping) and "loss" in tree else tree
        found = leaves_of(tensors(tree)) & self._leaves.keys()
        if found:
            label = self._leaves[found.pop()][1]
            raise StepError(
                f"The loss of {step} depends on the answer of {label} by way of autograd; that of "
                f"the batch that it was planned with did not. {SAME_DEPENDENCE}"
            )


class Expected:
    """Gradients that have come back over the boundaries of one plan, by stage and value."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def check(self, came: set[tuple[int, int]]) -> tuple[int, int] | None:
        """A value that got a gradient before and none in this batch.

        Zeros have gone on in its place, which optimizers do not treat as no gradient.

        Args:
            came: Values that got one from at least one microbatch.
        """
        missing, self._seen = self._seen - came, self._seen | came
        return min(missing, default=None)


def gradient_missing(step: str, label: str) -> StepError:
    """The error for a loss that has lost its dependence on the call ``label``."""
    return StepError(
        f"The loss of {step} does not depend on the answer of {label} by way of autograd; in a "
        f"batch before it did. {SAME_DEPENDENCE}"
    )
