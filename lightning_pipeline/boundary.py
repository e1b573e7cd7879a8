"""Tensors at the boundary of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline.errors import StepError

if TYPE_CHECKING:
    from lightning_pipeline.steps.pending import TensorMeta


def as_it_is(tensor: Tensor) -> Tensor:
    """``tensor`` with the conjugations and signs that torch has put off."""
    return tensor.resolve_conj().resolve_neg()


class _Boundary(torch.autograd.Function):
    """An alias that autograd does not know as a view, dense in both directions.

    A stage may write to what it gets, which neither a leaf nor a view of one allows, and gradients
    travel dense: that of a stage that begins with a sum is an expanded scalar.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        dense = as_it_is(tensor).contiguous()
        alias = dense.new_empty(0)
        return alias.set_(
            dense.untyped_storage(), dense.storage_offset(), dense.size(), dense.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def cross(tensor: Tensor) -> Tensor:
    """``tensor`` as a stage gets it: dense, no view, in the same autograd graph."""
    if not tensor.requires_grad:
        return as_it_is(tensor.detach()).contiguous()
    return _Boundary.apply(tensor)


def check_planned(stage: int, values: Sequence[Tensor], metas: Sequence[TensorMeta]) -> None:
    """Refuses values that the next stage has no room for.

    Raises:
        StepError: Naming their shape.
    """
    for value, meta in zip(values, metas, strict=True):
        if (tuple(value.shape), value.dtype) != (meta.shape, meta.dtype):
            raise StepError(
                f"Stage {stage} makes {value.dtype} of shape {tuple(value.shape)} where "
                f"{meta.dtype} of shape {meta.shape} was planned. The shapes that a step makes may "
                "only depend on those of its batch: cut or pad the batch in the DataLoader or in "
                "on_after_batch_transfer."
            )


def leaves_of(tensors: Iterable[Tensor]) -> set[int]:
    """Identities of the leaf tensors whose gradient a backward from ``tensors`` would fill."""
    found = {id(t) for t in tensors if t.grad_fn is None and t.requires_grad}
    seen = {t.grad_fn for t in tensors if t.grad_fn is not None}
    queue = list(seen)
    while queue:
        node = queue.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return found
