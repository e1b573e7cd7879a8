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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from lightning_pipeline.uses import (
    KINDS,
    LEAF,
    PRODUCTS,
    Kinds,
    Use,
    add_gradient,
    kind_of,
    saves_elsewhere,
)

Node = torch.autograd.graph.Node

_KEPT = "lightning_pipeline.kept"

_WHOLE = "CheckpointFunctionBackward"
"""Reentrant checkpoints run in a backward of the whole graph only."""

_SECONDS_PER_NODE = 4e-6
"""What a walk takes for one node, at most."""

_WORTH = 10.0
"""How much a fused backward must save for each second that it costs, since both are guesses."""


def hooks_made() -> int:
    """How many hooks this process has registered so far, on tensors, nodes or modules.

    Autograd does not tell which of its nodes have hooks. A forward that registers some is one whose
    backward is better left to autograd, as a whole: a hook on the way to a weight would be passed
    by, and one behind an operation would find no gradient of the weight.
    """
    return int(RemovableHandle.next_id)


def has_listeners(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether somebody keeps autograd's accumulation node of one of some parameters, to hook it.

    Call it while no graph is alive: the nodes then live as long as somebody keeps them.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with torch.enable_grad():
        for parameter in trained:
            _notes(parameter)[_KEPT] = True
        kept = [_notes(parameter).pop(_KEPT, False) for parameter in trained]
    return any(kept)


def _notes(parameter: nn.Parameter) -> dict[str, Any]:
    """What is noted at the accumulation node of a parameter, for as long as the node lives."""
    [(node, _)] = parameter.view_as(parameter).grad_fn.next_functions  # type: ignore[union-attr]
    notes: Any = node.metadata  # type: ignore[union-attr]  # a property, whatever torch's stub says
    return notes


class Deferred:
    """Weight gradients that are yet to be made.

    Args:
        uses: Operations with the gradients that came back to them.
        rest: Edges to parts of the graph that depend on weights alone, with their gradients.
    """

    def __init__(
        self, uses: list[tuple[Use, Tensor]], rest: list[tuple[GradientEdge, Tensor]]
    ) -> None:
        self._uses, self._rest = uses, rest

    def run(self) -> None:
        """Adds them to the weights' ``.grad``.

        Raises:
            RuntimeError: If the input of an operation has been written to in between.
        """
        for use, _ in self._uses:
            if use.given._version != use.version:
                raise RuntimeError(
                    "the input of an operation was changed in place before the gradient of its "
                    "weight was made"
                )
        with torch.no_grad():
            self._run_uses()
        if self._rest:
            edges, grads = zip(*self._rest, strict=True)
            torch.autograd.backward(edges, grads)

    def _run_uses(self) -> None:
        targets = [target for use, _ in self._uses for target in use.targets]
        counts = Counter(id(target.parameter) for target in targets)
        # Gradients of several uses are added in autograd's order: to each other, then to the rest.
        met: dict[Node, tuple[nn.Parameter, Tensor]] = {}
        for use, grad in self._uses:
            if all(counts[id(target.parameter)] == 1 for target in use.targets):
                use.add(grad)
                continue
            for target, own in zip(use.targets, use.gradients(grad, use.given), strict=True):
                before = met.get(target.meeting)
                own = own if before is None else before[1] + own
                met[target.meeting] = target.parameter, own
        sums: dict[nn.Parameter, Tensor] = {}
        for parameter, own in met.values():
            own = own.to(parameter.dtype)
            sums[parameter] = sums[parameter] + own if parameter in sums else own
        for parameter, own in sums.items():
            add_gradient(parameter, own, owned=True)


def is_worth_fusing(roots: Iterable[GradientEdge], bytes_per_second: float) -> bool:
    """Whether the backward is faster in two parts also where both are run at once.

    Autograd makes the gradient of a weight and adds it; here a product is added where it is made,
    so that it is not written and read once more. That must outweigh the walk over the graph.

    Args:
        roots: Where the backward starts.
        bytes_per_second: What an elementwise operation of the device moves.
    """
    walk = _Walk([edge.node for edge in roots], [], PRODUCTS)
    saved = sum(2 * use.nbytes for use in walk.uses.values()) / bytes_per_second
    return saved > _WORTH * walk.seconds


def walk_seconds(roots: Iterable[GradientEdge]) -> float:
    """What a backward takes longer in two parts, beside the operations; infinite if it cannot."""
    return _Walk([edge.node for edge in roots], [], KINDS).seconds


def split_backward(
    roots: Sequence[tuple[GradientEdge, Tensor]],
    inputs: Sequence[Tensor],
    *,
    products_alone: bool = False,
    whole: bool = False,
) -> tuple[list[Tensor | None], Deferred]:
    """Runs the first part of a backward.

    Args:
        roots: Where it starts, with the gradients there.
        inputs: Leaves whose gradients are wanted now.
        products_alone: Leave for the second part the weights of matrix products only.
        whole: Leave nothing for the second part.

    Returns:
        The gradients of ``inputs``, ``None`` where there is none, and the second part.
    """
    kinds = PRODUCTS if products_alone else KINDS
    walk = None if whole else _Walk([edge.node for edge, _ in roots], inputs, kinds)
    if walk is None or walk.is_whole:
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
    with _noted(uses) as noted:
        found = list(torch.autograd.grad(edges, wanted, grads, allow_unused=True))

    def take(number: int) -> list[Tensor | None]:
        taken = found[:number]
        del found[:number]
        return taken

    of_inputs = take(len(inputs))
    for leaf, grad in zip(walk.others, take(len(walk.others)), strict=True):
        if grad is not None:
            add_gradient(leaf, grad, owned=False)
            for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(leaf)
    pairs = zip(walk.cut, take(len(walk.cut)), strict=True)
    rest += [(edge, grad) for edge, grad in pairs if grad is not None]
    # Where an operation ran, what came to it behind the user's hooks on its output.
    came = [noted.get(use.node, grad) for use, grad in zip(uses, found, strict=True)]
    later = [(use, grad) for use, grad in zip(uses, came, strict=True) if grad is not None]
    later.sort(key=lambda pair: -pair[0].node._sequence_nr())
    return of_inputs, Deferred(later, rest)


@contextmanager
def _noted(uses: Sequence[Use]) -> Iterator[dict[Node, Tensor]]:
    """Notes what comes to operations that autograd runs in the block."""
    noted: dict[Node, Tensor] = {}

    def note(node: Node) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(grads: tuple[Tensor, ...]) -> None:
            if grads[0] is not None:
                noted[node] = grads[0]

        return hook

    handles = [use.node.register_prehook(note(use.node)) for use in uses]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


class _Walk:
    """The graph from its roots down to its leaves.

    Attributes:
        uses: Operations whose weights can wait.
        now: Nodes on a way to an input; to the deepest leaf if there is none.
        others: Leaves, inputs aside, that autograd reaches on the way.
        cut: Edges from there to what depends on weights alone.
        is_whole: Whether the graph runs in one piece only.
    """

    def __init__(self, roots: Iterable[Node], inputs: Sequence[Tensor], kinds: Kinds) -> None:
        self._kinds = kinds
        self.uses: dict[Node, Use] = {}
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
        while more := self._entangled():
            self.now = self._closed([*self.now, *more])
        self._find_borders(given)

    @property
    def seconds(self) -> float:
        """What it takes at most; infinite for a graph that runs in one piece only."""
        return float("inf") if self.is_whole else _SECONDS_PER_NODE * len(self._order)

    def _go(self, roots: Iterable[Node]) -> None:
        """Goes on, level by level, so that the last leaf is a deep one."""
        queue = [node for node in dict.fromkeys(roots) if node not in self._seen]
        self._seen.update(queue)
        for node in queue:
            self._order.append(node)
            name = kind_of(node)
            self.is_whole |= name == _WHOLE
            use = self._kinds[name](node) if name in self._kinds else None
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
            shared = [u for u in self.uses.values() if self._enters(u)]
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

    def _enters(self, use: Use) -> bool:
        return any(node in self._seen for target in use.targets for node in target.way)

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

    def _entangled(self) -> list[Node]:
        """Nodes beyond the borders at which the graph cannot be left.

        Autograd, asked for what comes back to a node, runs all that leads there. And what is
        computed again, because it was not saved, is computed in one backward only.
        """
        outside = [node for node in self._order if node not in self.now]
        return [node for node in outside if self._is_half_way(node) or saves_elsewhere(node)]

    def _is_half_way(self, node: Node) -> bool:
        users = self._users.get(node, ())
        return 0 < sum(user in self.now for user in users) < len(users)

    def _find_borders(self, given: set[int]) -> None:
        leaves = [node for node in self._order if node in self.now and kind_of(node) == LEAF]
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
