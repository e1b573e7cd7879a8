"""One call of a module with weights in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.errors import SplitError, StepError
from lightning_pipeline.splitting import Program
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.analyst import Signature
from lightning_pipeline.steps.pending import Pending, TensorMeta

SAME_DEPENDENCE = (
    "Whether a loss depends on a call may not change from batch to batch, nor between the "
    "microbatches of one. Multiply the term by 0 where it does not count, or freeze weights with "
    "requires_grad_(False) in a hook."
)
"""What to do where a loss depends on a call in some batches only."""


def _without_flags(signature: Signature) -> list[Any]:
    return [leaf[:2] if isinstance(leaf, tuple) else leaf for leaf in signature[1]]


@dataclass
class Call:
    """One call of a module with weights.

    Attributes:
        name: Dotted name of the module; ``""`` is the LightningModule's own forward.
        signature: Structure, shapes and Python values of the arguments.
        depends_on: Indices of the earlier calls that the arguments come from.
        program: The recording to cut, or ``None`` when the call stays in one piece.
        cost: Seconds of each piece.
        reads: Names of the parameters and buffers that each piece uses.
        writes: Names of the buffers that the call writes.
        output_spec: Structure of the output.
        outputs: Leaves of the output, a tensor as its TensorMeta, anything else as itself.
        cloned: Whether the step writes in place to the answer, which therefore is a copy.
        ambient: Autograd and autocast state, or modes and attributes of modules, at the call differ
            from those of the step's start.
        reason: Why it cannot be recorded, if it cannot.
        trains: Whether a gradient may reach it.
        dropped: Positions of outputs that could have a gradient, but for the loss.
        alone: Recording of its module as a whole, to measure its time if it is not cut.
    """

    name: str
    signature: Signature
    depends_on: frozenset[int]
    program: Program | None
    cost: list[float]
    reads: list[frozenset[str]]
    writes: frozenset[str]
    ambient: bool
    reason: SplitError | None = None
    output_spec: Any = None
    outputs: list[Any] = field(default_factory=list)
    cloned: bool = False
    trains: bool = True
    dropped: frozenset[int] = frozenset()
    alone: Program | None = None

    @property
    def num_pieces(self) -> int:
        return len(self.cost)

    @property
    def label(self) -> str:
        return f"self.{self.name}" if self.name else "self"

    def answer(self, leaves: dict[int, Tensor], device: torch.device) -> Any:
        """The call's output: given tensors where they are known, Pending ones elsewhere."""

        def leaf(position: int, known: Any) -> Any:
            if position in leaves:
                tensor = leaves[position]
                return tensor.clone() if self.cloned else tensor.view_as(tensor)
            return Pending.like(known, device) if isinstance(known, TensorMeta) else known

        flat = [leaf(position, known) for position, known in enumerate(self.outputs)]
        return pytree.tree_unflatten(flat, self.output_spec)

    def may_train(self, key: int, complete: bool) -> bool:
        """Whether a value may need a gradient, or would do so in vain.

        Args:
            key: Position among the outputs, or id of the program's value.
            complete: Whether it is an output.
        """
        if not self.trains or (complete and key in self.dropped):
            return True
        if complete:
            return bool(self.outputs[key].requires_grad)
        assert self.program is not None
        return self.program.values[key].requires_grad

    def trains_now(self) -> StepError:
        """The error for a value that needs a gradient and did not when it was planned."""
        return StepError(
            f"{self.label} gives a tensor that needs a gradient; when it was planned, what it gave "
            f"did not, so no gradient would come back. {SAME_DEPENDENCE}"
        )

    def other_arguments(self, given: Signature) -> StepError:
        """The error for arguments that the module was not cut for."""
        then = self.signature
        shapes_alone = given[0] == then[0] and all(
            old == new or isinstance(new, tuple) for old, new in zip(then[1], given[1], strict=True)
        )
        if shapes_alone and _without_flags(given) == _without_flags(then):
            return StepError(
                f"{self.label} is called with arguments that need a gradient where they did not "
                f"when it was cut, or the other way round. {SAME_DEPENDENCE}"
            )
        cure = (
            "The shapes that a step makes may only depend on those of its batch: cut or pad the "
            "batch in the DataLoader or in on_after_batch_transfer."
            if shapes_alone
            else "What a cut module gets besides tensors may not change from batch to batch: pass "
            "it as a tensor."
        )
        return StepError(
            f"{self.label} is called with {given[1]}; it was cut for {then[1]}. {cure}"
        )
