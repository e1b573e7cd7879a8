"""Tensors at the boundary of a stage, and which stages may split their backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting.torch_private import FunctionBase, saves_otherwise

if TYPE_CHECKING:
    from lightning_pipeline.steps.pending import TensorMeta

Node = torch.autograd.graph.Node


class _Boundary(torch.autograd.Function):
    """An alias that autograd does not know as a view, dense in both directions.

    Split backward detaches stage outputs in place, which a view refuses, and messages are dense:
    ``nn.Linear`` on a 3-D input ends in a view, and a stage that begins with a sum has a gradient
    that is an expanded scalar.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        dense = tensor.contiguous()
        alias = dense.new_empty(0)
        return alias.set_(
            dense.untyped_storage(), dense.storage_offset(), dense.size(), dense.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def cross(tensor: Tensor) -> Tensor:
    """``tensor`` as it leaves or enters a stage: dense, no view, in the same autograd graph."""
    if not tensor.requires_grad:
        return tensor.detach().contiguous()
    return _Boundary.apply(tensor)


def forget_values(sent: Any) -> None:
    """Lets go of the memory of values that are on their way; their place in the graph stays."""
    for value in sent if isinstance(sent, tuple) else (sent,):
        value.data = value.new_empty(()).expand(value.shape)


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


def can_split(outputs: Iterable[Any], inputs: Iterable[Any]) -> bool:
    """Whether torch's split backward gives a stage all its weight gradients, and each once.

    torch finds the weights by what they share with the path of a differentiable input. It loses
    the gradients of weights on other paths (frozen or identity stages before, an embedding whose
    result only passes through), fails where a weight, or two parts of it, are used with another
    one in between, and runs opaque nodes (custom functions, compiled blocks) twice, as what is
    computed again because it was not saved. Such stages run their whole backward at once instead.

    Args:
        outputs: The stage's outputs, or its loss.
        inputs: Its received values.
    """
    roots = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
    leaves = {id(t) for t in inputs if isinstance(t, Tensor) and t.requires_grad}
    if not leaves:
        return False
    users: dict[Node, list[Node]] = {}
    entries: list[Node] = []
    seen, queue = set(roots), list(roots)
    while queue:
        node = queue.pop()
        if _is_opaque(node):
            return False
        for following, _ in node.next_functions:
            if following is None:
                continue
            users.setdefault(following, []).append(node)
            if following not in seen:
                seen.add(following)
                queue.append(following)
                if id(getattr(following, "variable", None)) in leaves:
                    entries.append(following)
    on_paths = _closure(entries, users)
    if any(len(users.get(node, ())) > 1 for node in seen - on_paths):
        return False  # a weight, or what was made from one
    return set(roots) <= on_paths


def _is_opaque(node: Node) -> bool:
    # Autograd functions written in Python are nodes of a Python class.
    kinds = type(node).__mro__
    if FunctionBase in kinds:
        return _Boundary._backward_cls not in kinds
    return saves_otherwise(node)


def _closure(nodes: Sequence[Node], users: dict[Node, list[Node]]) -> set[Node]:
    closure, queue = set(nodes), list(nodes)
    while queue:
        for user in users.get(queue.pop(), ()):
            if user not in closure:
                closure.add(user)
                queue.append(user)
    return closure
