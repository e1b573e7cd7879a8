"""The backward of a stage in two parts: gradients of its inputs now, of its weights later.

torch's own split asks autograd for the inputs, keeps the whole graph, and asks again for the
weights, one call a parameter group. Here the recorded graph is walked once. Every linear layer,
convolution and embedding in it has a weight gradient that is a function of two tensors: what went
into the operation, which the graph has saved, and the gradient that comes back to it. So autograd
runs once, for the inputs, without these weights; what comes back to the operations is noted, and
the weight gradients are made of the pairs when their turn comes. What is not recognised is done by
autograd, at once. Parts of the graph that depend on weights alone (a weight norm, say) are run by
autograd later, as a whole.

The names of autograd's nodes and of what they save are those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

Node = torch.autograd.graph.Node

_LEAF = "AccumulateGrad"
_WHOLE = "CheckpointFunctionBackward"
"""Reentrant checkpoints run in a backward of the whole graph only."""


@dataclass
class _Use:
    """One operation with a weight, whose gradient is made later.

    Attributes:
        node: Its node.
        make: Makes the gradients of weight and bias of what came back, and adds them.
        given: What went into it.
        version: How often that had been written to.
        avoided: The nodes between it and its weight and bias, which autograd is not to enter.
        following: The other edges.
    """

    node: Node
    make: Callable[[Tensor, Tensor], None]
    given: Tensor
    avoided: list[Node]
    following: list[Node]
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.given._version


class Deferred:
    """Weight gradients that are yet to be made.

    Args:
        uses: Operations with the gradients that came back to them.
        rest: Edges to parts of the graph that depend on weights alone, with their gradients.
    """

    def __init__(
        self, uses: list[tuple[_Use, Tensor]], rest: list[tuple[GradientEdge, Tensor]]
    ) -> None:
        self._uses, self._rest = uses, rest

    def run(self) -> None:
        """Adds them to the weights' ``.grad``.

        Raises:
            RuntimeError: If the input of an operation has been written to in between.
        """
        with torch.no_grad():
            for use, grad in self._uses:
                if use.given._version != use.version:
                    raise RuntimeError(
                        "the input of an operation was changed in place before the gradient of "
                        "its weight was made"
                    )
                use.make(grad, use.given)
        if self._rest:
            edges, grads = zip(*self._rest, strict=True)
            torch.autograd.backward(edges, grads)


def split_backward(
    roots: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Deferred]:
    """Runs the first part of a backward.

    Args:
        roots: Where it starts, with the gradients there.
        inputs: Leaves whose gradients are wanted now.

    Returns:
        The gradients of ``inputs``, ``None`` where there is none, and the second part.
    """
    walk = _Walk([edge.node for edge, _ in roots], inputs)
    if walk.is_whole:
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        found = [leaf.grad for leaf in inputs]
        for leaf in inputs:
            leaf.grad = None
        return found, Deferred([], [])
    now = [root for root in roots if root[0].node in walk.now]
    rest = [root for root in roots if root[0].node not in walk.now]
    uses = [use for node, use in walk.uses.items() if node in walk.now]
    wanted: list[Any] = [*inputs, *walk.others, *walk.cut]
    wanted += [GradientEdge(use.node, 0) for use in uses]
    if not now or not wanted:
        return [None] * len(inputs), Deferred([], rest)
    edges, grads = zip(*now, strict=True)
    found = list(torch.autograd.grad(edges, wanted, grads, allow_unused=True))

    def take(number: int) -> list[Tensor | None]:
        taken = found[:number]
        del found[:number]
        return taken

    of_inputs = take(len(inputs))
    for leaf, grad in zip(walk.others, take(len(walk.others)), strict=True):
        if grad is not None:
            _add(leaf, grad, owned=False)
            for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(leaf)
    pairs = zip(walk.cut, take(len(walk.cut)), strict=True)
    rest += [(edge, grad) for edge, grad in pairs if grad is not None]
    later = [(use, grad) for use, grad in zip(uses, found, strict=True) if grad is not None]
    return of_inputs, Deferred(later, rest)


class _Walk:
    """The graph from its roots down to its leaves.

    Attributes:
        uses: Operations whose weights can wait.
        now: Nodes on a way to an input; to the deepest leaf if there is none.
        others: Leaves, inputs aside, that autograd reaches on the way.
        cut: Edges from there to what depends on weights alone.
        is_whole: Whether the graph runs in one piece only.
    """

    def __init__(self, roots: Iterable[Node], inputs: Sequence[Tensor]) -> None:
        self.uses: dict[Node, _Use] = {}
        self.is_whole = False
        self._users: dict[Node, list[Node]] = {}
        self._leaves: list[Node] = []
        self._order: list[Node] = []
        self._seen: set[Node] = set()
        self._go(roots)
        self._give_up_shared()
        given = {id(leaf) for leaf in inputs}
        entries = [n for n in self._leaves if id(getattr(n, "variable", None)) in given]
        self.now = self._closed(entries or self._leaves[-1:])
        self._find_borders(given)

    def _go(self, roots: Iterable[Node]) -> None:
        """Goes on, level by level, so that the last leaf is a deep one."""
        queue = [node for node in dict.fromkeys(roots) if node not in self._seen]
        self._seen.update(queue)
        for node in queue:
            self._order.append(node)
            name = _kind(node)
            self.is_whole |= name == _WHOLE
            use = _KINDS[name](node) if name in _KINDS else None
            if use is not None:
                self.uses[node] = use
            following = self._following(node)
            if not following:
                self._leaves.append(node)
            for child in following:
                self._users.setdefault(child, []).append(node)
                if child not in self._seen:
                    self._seen.add(child)
                    queue.append(child)

    def _following(self, node: Node) -> list[Node]:
        use = self.uses.get(node)
        if use is not None:
            return use.following
        return [child for child, _ in node.next_functions if child is not None]

    def _give_up_shared(self) -> None:
        """Leaves to autograd the weights that it reaches by another way as well."""
        while True:
            shared = [u for u in self.uses.values() if any(n in self._seen for n in u.avoided)]
            if not shared:
                return
            for use in shared:
                del self.uses[use.node]
                children = self._following(use.node)
                for child in children:
                    if use.node not in self._users.setdefault(child, []):
                        self._users[child].append(use.node)
                if use.node in self._leaves:
                    self._leaves.remove(use.node)
                self._go(children)

    def _closed(self, nodes: Sequence[Node]) -> set[Node]:
        """All nodes on a way to one of some, or to a leaf that those lead to as well."""
        ends = set(self._leaves)
        found, queue = set(nodes), list(nodes)
        for node in queue:
            reached = [n for n in self._following(node) if n in ends]
            for other in (*self._users.get(node, ()), *reached):
                if other not in found:
                    found.add(other)
                    queue.append(other)
        return found

    def _find_borders(self, given: set[int]) -> None:
        leaves = [node for node in self._order if node in self.now and _kind(node) == _LEAF]
        variables: list[Tensor] = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
        self.others = [leaf for leaf in variables if id(leaf) not in given]
        edges = {
            (child, position): None
            for node in self._order
            if node in self.now
            for followed in [self._following(node)]
            for child, position in node.next_functions
            if child is not None and child not in self.now and child in followed
        }
        self.cut = [GradientEdge(*edge) for edge in edges]


def _kind(node: Node) -> str:
    # not by node.name(): a user's function may have left something else under that name
    return type(node).__name__


def _add(leaf: Tensor, grad: Tensor, *, owned: bool) -> None:
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
        name = _kind(node)
        if name == _LEAF:
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
) -> _Use | None:
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
            _add(weight, torch.mm(left, right), owned=True)
        if bias is not None:
            _add(bias, grad.sum(0), owned=True)

    following += [data_edge] if data_edge is not None else []
    return _Use(node, make, given, way + bias_way, following)


def _addmm(node: Any) -> _Use | None:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    (bias, _), (data, _), (weight, _) = node.next_functions
    return _product(node, weight, lambda: node._raw_saved_mat1, bias, data)


def _mm(node: Any) -> _Use | None:
    (data, _), (weight, _) = node.next_functions
    return _product(node, weight, lambda: node._raw_saved_self, None, data)


def _convolution(node: Any) -> _Use | None:
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
        _add(weight, of_weight, owned=True)
        if bias is not None:
            _add(bias, of_bias, owned=True)

    following += [data] if data is not None else []
    return _Use(node, make, given, way + bias_way, following)


def _embedding(node: Any) -> _Use | None:
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

    return _Use(node, make, indices, way, [])


_KINDS: dict[str, Callable[[Any], _Use | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
}
