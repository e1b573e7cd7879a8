"""A recorded call of a module: what it computes, in which order, and where it may be cut."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeline.splitting.cost import PieceWork, Rates, Work, backward_work, weight_work
from lightning_pipeline.splitting.ir import Node, Value
from lightning_pipeline.splitting.liveness import Liveness
from lightning_pipeline.splitting.pictures import Change
from lightning_pipeline.splitting.settings import frozen
from lightning_pipeline.splitting.watch import Place, Watch, plain_value

PLAIN_TYPES = (bool, int, float, str)
"""Types of the values that are compared by value wherever they stand."""


def is_same(now: object, then: object) -> bool:
    """Whether two plain values are equal; NaN is, although it says that it is not."""
    return type(now) is type(then) and (now == then or (now != now and then != then))


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` has been written to; -1 for one of inference, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


class ChangedSetting(NamedTuple):
    """An attribute that is no longer what the recording burnt in, both as messages show it."""

    module: str
    attribute: str
    then: object
    now: object


class Program:
    """One recording of a module's forward, for one signature of its arguments and one mode.

    A *piece* is a node that lives on one stage; the other nodes are local: cheap, made from the
    call's arguments alone, and repeated wherever they are needed.

    Args:
        module: The recorded module; its submodules are called in place, nothing is copied.
        nodes: All recorded calls in order.
        values: All values, by id.
        inputs: Pairs of position among the leaves of ``(args, kwargs)``, and value id.
        outputs: Flat leaves of the output: a `ValueRef` for each tensor, else the object.
        output_spec: Pytree spec of the output.
        leaves: Names at which the recording stopped.
        kept_whole: Reasons of the modules that could not be opened.
        settings: Attributes that are burnt in, with their values, frozen.
        others: Modules outside of ``module`` among them, by the names given to them.
        storage_names: Names of the state whose memory values may be views of.
        rates: Speed of the device.

    Attributes:
        num_pieces: Number of pieces, N.
        reads: For each piece, names of the parameters and buffers that it uses.
        writes: For each piece, names of those that it writes in place.
        legal: bool [N + 1], whether a stage may begin before piece p.
        live: [N + 1], ids of the values carried over the cut before piece p.
        bytes_at: float [N + 1], bytes of these values.
        work: For each piece, what it does in the forward and, where gradients flow, backward.
        cost: float [N], seconds of both.
        piece_names: Dotted name of each piece's module.
        generators: For each piece, identities of the generators of random numbers that it may use.
        constants: Tensors that are attributes and operands, burnt in.
        changes: What the forward changes at its first call alone, to be made on every rank.
        draws_outside_torch: Whether a module was kept whole because its forward draws from
            Python's or NumPy's generator.
    """

    def __init__(
        self,
        module: nn.Module,
        nodes: list[Node],
        values: list[Value],
        inputs: list[tuple[int, int]],
        outputs: list[Any],
        output_spec: Any,
        *,
        leaves: frozenset[str],
        kept_whole: dict[str, str],
        settings: dict[Place, Hashable],
        others: dict[str, nn.Module],
        storage_names: dict[int, str],
        rates: Rates,
        draws_outside_torch: bool = False,
    ) -> None:
        self.module, self.nodes, self.values, self.inputs = module, nodes, values, inputs
        self.output_metas, self.output_spec = outputs, output_spec
        self.leaves, self.kept_whole, self.settings = leaves, kept_whole, settings
        self.others, self._watch = others, Watch(module, settings, others)
        # A step that the user has compiled would have its looks at Python objects traced.
        self._look: Callable[[], int] = torch.compiler.disable(self._watch.look)
        self._same_at = -1
        self.changes: list[Change] = []
        self.constants: dict[Place, Tensor] = {}
        self.draws_outside_torch = draws_outside_torch
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        flow = Liveness(nodes, values, inputs, outputs, parameters, storage_names)
        self.pieces, self.legal, self.live = flow.pieces, flow.legal, flow.live
        self.reads, self.writes = flow.reads, flow.writes
        self.num_pieces = len(self.pieces)
        placed = [nodes[index] for index in self.pieces]
        self.piece_names = [node.name for node in placed]
        self.generators = [node.generators for node in placed]
        sizes = {
            name: p.numel() * p.element_size()
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        self.work = [self._work(node, sizes) for node in placed]
        self.cost = np.array([work.seconds(rates) for work in self.work], float)
        nbytes = [sum(values[value].nbytes for value in alive) for alive in self.live]
        self.bytes_at = np.array(nbytes, float)

    def _work(self, node: Node, trained: dict[str, int]) -> PieceWork:
        """What a node does; ``trained`` are the bytes of weights with gradients."""
        values = self.values
        if not any(values[value].requires_grad for _, value in node.outputs) and not node.writes:
            return PieceWork(node.work, Work(), Work())
        weights = [trained[name] for name in node.state if name in trained]
        to_inputs = any(values[value].requires_grad for value in node.operands)
        asked = node.work, to_inputs + bool(weights or not node.state), sum(weights)
        return PieceWork(node.work, backward_work(*asked), weight_work(*asked))

    def changed_settings(self) -> list[ChangedSetting]:
        """Attributes that opened modules read and that differ from those at the recording."""
        # As long as nothing is traced the look goes without the detour around the compiler.
        is_traced = torch.compiler.is_dynamo_compiling()
        moment = self._look() if is_traced else self._watch.look()
        if moment == self._same_at:
            return []
        now = self._watch.values
        changed = [
            ChangedSetting(*place, plain_value(then), plain_value(now[place]))
            for place, then in self.settings.items()
            if now[place] != then
        ]
        if not changed:
            self._same_at = moment
        return changed

    def does_as(self, other: Program) -> bool:
        """Whether two recordings of one call are the same."""
        return frozen(self._content()) == frozen(other._content())

    def _content(self) -> Any:
        nodes = [
            (n.target, n.args, n.kwargs, n.outputs, n.single, n.where, n.ambient, n.checkpoint)
            for n in self.nodes
        ]
        return nodes, self.inputs, self.output_metas, str(self.output_spec)
