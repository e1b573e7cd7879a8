"""Operations whose weight gradient is a function of two tensors, and can be made at any time.

The names of autograd's nodes and of what they save are those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Node = torch.autograd.graph.Node

LEAF = "AccumulateGrad"
_SAVE_NOTHING = (LEAF, "TBackward0", "ToCopyBackward0")


@dataclass
class Target:
    """A parameter, and the way that a gradient takes to it.

    Attributes:
        parameter: The parameter.
        way: The nodes of casts and transpositions, and its own; autograd is not to enter them.
        transposed: Whether an operation has used its transposition.
    """

    parameter: nn.Parameter
    way: list[Node]
    transposed: bool = False

    @property
    def meeting(self) -> Node:
        """Where autograd would add the gradients of several uses of the parameter."""
        return next(node for node in self.way if kind_of(node) != "TBackward0")


@dataclass
class Use:
    """One operation with a weight, whose gradient is made later.

    Attributes:
        node: Its node.
        targets: Its weight, and its bias if that can wait.
        given: What went into it.
        gradients: Makes the gradients of the targets of what came back, and what went in.
        following: The edges to enter.
        version: How often ``given`` had been written to.
    """

    node: Node
    targets: list[Target]
    given: Tensor
    gradients: Callable[[Tensor, Tensor], list[Tensor]]
    following: list[Node]
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.given._version

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.targets[0].parameter.nbytes

    def add(self, grad: Tensor) -> None:
        """Adds the gradients of the targets, where nothing else of the graph uses these."""
        for target, own in zip(self.targets, self.gradients(grad, self.given), strict=True):
            add_gradient(target.parameter, own, owned=True)


class Product(Use):
    """A matrix product, added in place: nothing of the weight's size is made for it.

    The numbers are autograd's; those of many rows, which are multiplied in blocks, are rounded
    differently.
    """

    def add(self, grad: Tensor) -> None:
        weight = self.targets[0]
        sums = weight.parameter.grad
        is_fused = sums is not None and sums.dtype == grad.dtype and sums.layout is torch.strided
        # narrow numbers would be rounded once where autograd rounds twice
        if sums is None or not is_fused or grad.dtype.itemsize < 4:
            super().add(grad)
            return
        left, right = _order(weight, grad, self.given)
        sums.addmm_(left, right)
        for bias in self.targets[1:]:
            add_gradient(bias.parameter, grad.sum(0), owned=True)


def _order(weight: Target, grad: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the gradient of a weight."""
    return (grad.t(), given) if weight.transposed else (given.t(), grad)


def kind_of(node: Node) -> str:
    # not by node.name(): a user's function may have left something else under that name
    return type(node).__name__


def add_gradient(leaf: Tensor, grad: Tensor, *, owned: bool) -> None:
    """Adds ``grad`` to ``leaf.grad``; ``owned`` says that nobody else has it."""
    grad = grad if grad.dtype == leaf.dtype else grad.to(leaf.dtype)
    if leaf.grad is None:
        if grad.layout is torch.strided and (not owned or grad.stride() != leaf.stride()):
            grad = torch.empty_like(leaf).copy_(grad)
        leaf.grad = grad
    elif leaf.grad.layout is torch.strided:
        leaf.grad.add_(grad)
    else:
        leaf.grad = leaf.grad + grad


def _target(node: Node | None) -> Target | None:
    """The parameter behind a cast and transpositions, if it is one that can wait.

    Behind several casts it cannot: autograd would round its gradient to the type between them.
    """
    way, transposed, casts = [], False, 0
    while node is not None:
        way.append(node)
        name = kind_of(node)
        if name == LEAF:
            leaf = node.variable  # type: ignore[attr-defined]
            return Target(leaf, way, transposed) if _can_wait(leaf) else None
        if name == "TBackward0":
            transposed = not transposed
        elif name == "ToCopyBackward0":
            casts += 1
        if casts > 1 or name not in ("TBackward0", "ToCopyBackward0"):
            return None
        node = node.next_functions[0][0]
    return None


def _can_wait(leaf: Tensor) -> bool:
    """Whether nobody listens to the gradient of a plain, real, dense parameter."""
    return (
        type(leaf) is nn.Parameter
        and type(leaf.data) is Tensor
        and not leaf.is_complex()
        and not leaf._backward_hooks
        and not getattr(leaf, "_post_accumulate_grad_hooks", None)
    )


def _saved(node: Any, name: str) -> Tensor | None:
    """What a node has saved; ``None`` if it has gone elsewhere, as checkpointing makes it.

    Raises:
        RuntimeError: Autograd's, if it has been written to since.
    """
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        return None
    saved: Tensor | None = getattr(node, f"_saved_{name}")
    return saved


def _bias(node: Node | None, size: int) -> tuple[list[Target], list[Node]]:
    """The bias of ``size`` outputs, and the edge to follow instead if it cannot wait."""
    if node is None:
        return [], []
    target = _target(node)
    if target is None or target.transposed or target.parameter.shape != (size,):
        return [], [node]
    return [target], []


def _product(
    node: Node, weight: Target | None, factor: str, bias: Node | None, data: Node | None
) -> Use | None:
    given = None if weight is None else _saved(node, factor)
    if weight is None or given is None or given.is_complex():
        return None
    biases, following = _bias(bias, weight.parameter.shape[0 if weight.transposed else 1])

    def gradients(grad: Tensor, given: Tensor) -> list[Tensor]:
        found = [torch.mm(*_order(weight, grad, given))]
        return found + [grad.sum(0) for _ in biases]

    following += [data] if data is not None else []
    return Product(node, [weight, *biases], given, gradients, following)


def _addmm(node: Any) -> Use | None:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    (bias, _), (data, _), (weight, _) = node.next_functions
    return _product(node, _target(weight), "mat1", bias, data)


def _mm(node: Any) -> Use | None:
    (data, _), (weight, _) = node.next_functions
    return _product(node, _target(weight), "self", None, data)


def _convolution(node: Any) -> Use | None:
    (data, _), (weight_edge, _), (bias, _) = node.next_functions
    weight = _target(weight_edge)
    if weight is None or weight.transposed:
        return None
    given, used = _saved(node, "input"), _saved(node, "weight")
    if given is None or used is None or given.is_complex():
        return None
    manner = (
        *(node._saved_stride, node._saved_padding, node._saved_dilation),
        *(node._saved_transposed, node._saved_output_padding, node._saved_groups),
    )
    first, second = weight.parameter.shape[:2]
    size = second * node._saved_groups if node._saved_transposed else first
    biases, following = _bias(bias, size)
    sizes = list(biases[0].parameter.shape) if biases else None
    wanted = [False, True, bool(biases)]

    def gradients(grad: Tensor, given: Tensor) -> list[Tensor]:
        _, *found = torch.ops.aten.convolution_backward(grad, given, used, sizes, *manner, wanted)
        return [own for own in found if own is not None]

    following += [data] if data is not None else []
    return Use(node, [weight, *biases], given, gradients, following)


@dataclass
class _Lookup(Use):
    """An embedding: only the rows that were looked up are added to."""

    padding: int = -1

    def add(self, grad: Tensor) -> None:
        weight = self.targets[0].parameter
        # a device waits where it is asked for the rows
        if weight.grad is None or weight.grad.layout is not torch.strided or not weight.is_cpu:
            super().add(grad)
            return
        # summed row by row first, as autograd does it
        rows, places = self.given.reshape(-1).unique(return_inverse=True)
        sums = grad.new_zeros(len(rows), grad.shape[-1])
        sums.index_add_(0, places, self._masked(grad))
        weight.grad.index_add_(0, rows, sums.to(weight.grad.dtype))

    def _masked(self, grad: Tensor) -> Tensor:
        grad = grad.reshape(-1, grad.shape[-1])
        if self.padding < 0:
            return grad
        return grad.masked_fill((self.given.reshape(-1) == self.padding)[:, None], 0)


def _embedding(node: Any) -> Use | None:
    weight = _target(node.next_functions[0][0])
    if weight is None or weight.transposed:
        return None
    if node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    indices = _saved(node, "indices")
    if indices is None:
        return None
    count = weight.parameter.shape[0]
    padding = node._saved_padding_idx if node._saved_padding_idx < count else -1  # unsigned -1

    def gradients(grad: Tensor, indices: Tensor) -> list[Tensor]:
        return [torch.ops.aten.embedding_dense_backward(grad, indices, count, padding, False)]

    return _Lookup(node, [weight], indices, gradients, [], padding)


Kinds = dict[str, Callable[[Any], Use | None]]
PRODUCTS: Kinds = {"AddmmBackward0": _addmm, "MmBackward0": _mm}
KINDS: Kinds = {
    **PRODUCTS,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
}


def saves_elsewhere(node: Node) -> bool:
    """Whether what a node has saved went through hooks, as checkpointing makes it."""
    if kind_of(node) in _SAVE_NOTHING:
        return False
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                if getattr(one, "unpack_hook", None) is not None:
                    return True
    return False
