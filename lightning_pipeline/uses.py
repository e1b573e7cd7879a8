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


@dataclass
class Use:
    """One operation with a weight, whose gradient is made later.

    Attributes:
        node: Its node.
        nbytes: Bytes of the weight.
        make: Makes the gradients of weight and bias of what came back, and adds them.
        given: What went into it.
        version: How often that had been written to.
        avoided: The nodes between it and its weight and bias, which autograd is not to enter.
        following: The other edges.
    """

    node: Node
    nbytes: int
    make: Callable[[Tensor, Tensor], None]
    given: Tensor
    avoided: list[Node]
    following: list[Node]
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.given._version


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


def _parameter(node: Node | None) -> tuple[nn.Parameter | None, bool, list[Node]]:
    """The parameter behind casts and transpositions, whether it was transposed, and the way."""
    way, transposed = [], False
    while node is not None:
        way.append(node)
        name = kind_of(node)
        if name == LEAF:
            leaf = node.variable  # type: ignore[attr-defined]
            return (leaf if _can_wait(leaf) else None), transposed, way
        if name == "TBackward0":
            transposed = not transposed
        elif name != "ToCopyBackward0":
            break
        node = node.next_functions[0][0]
    return None, transposed, way


def _can_wait(leaf: Tensor) -> bool:
    """Whether nobody listens to the gradient of a plain, real, dense parameter."""
    return (
        type(leaf) is nn.Parameter
        and type(leaf.data) is Tensor
        and not leaf.is_complex()
        and not leaf._backward_hooks
        and not getattr(leaf, "_post_accumulate_grad_hooks", None)
    )


def _saved(raw: Any) -> Tensor | None:
    """What a node has saved; ``None`` if it has gone elsewhere, as checkpointing makes it."""
    return raw.data if raw.unpack_hook is None else None


def _bias(node: Node | None) -> tuple[nn.Parameter | None, list[Node], list[Node]]:
    """The bias, the way to it, and the edges to follow instead if it is none that can wait."""
    if node is None:
        return None, [], []
    bias, _, way = _parameter(node)
    if bias is None or bias.dim() != 1 or len(way) > 2:
        return None, [], [node]
    return bias, way, []


def _product(
    node: Node,
    weight_edge: Node | None,
    raw: Any,
    bias_edge: Node | None,
    data_edge: Node | None,
) -> Use | None:
    weight, transposed, way = _parameter(weight_edge)
    if weight is None:
        return None
    given = _saved(raw())
    if given is None:
        return None
    bias, bias_way, following = _bias(bias_edge)

    def make(grad: Tensor, given: Tensor) -> None:
        left, right = (grad.t(), given) if transposed else (given.t(), grad)
        sums = weight.grad
        if sums is not None and sums.dtype == grad.dtype and sums.layout is torch.strided:
            sums.addmm_(left, right)
        else:
            add_gradient(weight, torch.mm(left, right), owned=True)
        if bias is not None:
            add_gradient(bias, grad.sum(0), owned=True)

    following += [data_edge] if data_edge is not None else []
    return Use(node, weight.nbytes, make, given, way + bias_way, following)


def _addmm(node: Any) -> Use | None:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    (bias, _), (data, _), (weight, _) = node.next_functions
    return _product(node, weight, lambda: node._raw_saved_mat1, bias, data)


def _mm(node: Any) -> Use | None:
    (data, _), (weight, _) = node.next_functions
    return _product(node, weight, lambda: node._raw_saved_self, None, data)


def _convolution(node: Any) -> Use | None:
    (data, _), (weight_edge, _), (bias_edge, _) = node.next_functions
    weight, transposed, way = _parameter(weight_edge)
    if weight is None or transposed:
        return None
    given, used = _saved(node._raw_saved_input), _saved(node._raw_saved_weight)
    if given is None or used is None:
        return None
    bias, bias_way, following = _bias(bias_edge)
    manner = (
        *(node._saved_stride, node._saved_padding, node._saved_dilation),
        *(node._saved_transposed, node._saved_output_padding, node._saved_groups),
    )
    sizes = None if bias is None else list(bias.shape)
    wanted = [False, True, bias is not None]

    def make(grad: Tensor, given: Tensor) -> None:
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grad, given, used, sizes, *manner, wanted
        )
        add_gradient(weight, of_weight, owned=True)
        if bias is not None:
            add_gradient(bias, of_bias, owned=True)

    following += [data] if data is not None else []
    return Use(node, weight.nbytes, make, given, way + bias_way, following)


def _embedding(node: Any) -> Use | None:
    weight, transposed, way = _parameter(node.next_functions[0][0])
    if weight is None or transposed or node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    indices = _saved(node._raw_saved_indices)
    if indices is None:
        return None
    padding = node._saved_padding_idx

    def make(grad: Tensor, indices: Tensor) -> None:
        rows, grad = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if padding >= 0:
            grad = grad.masked_fill((rows == padding)[:, None], 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, rows, grad.to(weight.dtype))

    return Use(node, weight.nbytes, make, indices, way, [])


Kinds = dict[str, Callable[[Any], Use | None]]
PRODUCTS: Kinds = {"AddmmBackward0": _addmm, "MmBackward0": _mm}
KINDS: Kinds = {
    **PRODUCTS,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
}
