"""Which nodes are placed, what crosses a cut, and where no cut is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_pipeline.splitting.ir import Node, Value, value_refs

LOCAL_FLOPS_SHARE = 1e-3
"""A node with a larger share of the program's FLOPs is never repeated on several stages."""


class Liveness:
    """Analysis of a recording over the sequence of its placed nodes.

    Args:
        nodes: All nodes of the recording; their ``local`` flags are set here.
        values: All values; their ``local`` flags are set here.
        inputs: Pairs of position among the arguments, and value id.
        outputs: Template of the output's leaves.
        parameters: Names of the module's parameters.
        storage_names: Names of parameters and buffers by storage.
    """

    def __init__(
        self,
        nodes: list[Node],
        values: list[Value],
        inputs: list[tuple[int, int]],
        outputs: list[Any],
        parameters: set[str],
        storage_names: dict[int, str],
    ) -> None:
        self.nodes, self.values = nodes, values
        self.inputs = {value for _, value in inputs}
        self.outputs = [ref.id for ref in value_refs(outputs)]
        self.storage_names = storage_names
        self.dirty = frozenset().union(*(node.writes for node in self.nodes))
        self.dirty_state = {name for node in self.nodes for name in node.state_writes}
        self._mark_local(parameters)
        self.pieces = [i for i, node in enumerate(self.nodes) if not node.local]
        self.live = self._live()
        self.legal = self._legal()
        self.reads = self._reads()
        self.writes = [frozenset(self.nodes[i].state_writes) for i in self.pieces]

    def _mark_local(self, parameters: set[str]) -> None:
        """Inputs are everywhere; so is what is cheaply, and always alike, computed from them."""
        for value in self.values:
            value.local = False
        for value_id in self.inputs:
            # an input that is written in place differs from what the other stages have
            self.values[value_id].local = self.values[value_id].storage not in self.dirty
        limit = LOCAL_FLOPS_SHARE * (sum(node.work.flops for node in self.nodes) or 1.0)
        bound = parameters | self.dirty_state
        for node in self.nodes:
            node.local = (
                node.work.flops < limit
                and self._is_pure(node)
                and bound.isdisjoint(node.state)
                and all(self.values[value].local for value in node.operands)
                and not any(self.values[value].requires_grad for _, value in node.outputs)
            )
            for _, value_id in node.outputs:
                self.values[value_id].local = node.local

    def _is_pure(self, node: Node) -> bool:
        dirty = any(self.values[value].storage in self.dirty for _, value in node.outputs)
        effects = (
            node.random
            or node.generators
            or node.has_hooks
            or node.writes
            or node.state_writes
            or dirty
        )
        return bool(node.outputs) and not effects

    def _live(self) -> list[list[int]]:
        position = {index: piece for piece, index in enumerate(self.pieces)}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for piece, index in enumerate(self.pieces):
            for operand in self.nodes[index].operands:
                first.setdefault(operand, piece)
                last[operand] = piece
        num_pieces = len(self.pieces)
        last.update(dict.fromkeys(self.outputs, num_pieces))
        live: list[list[int]] = [[] for _ in range(num_pieces + 1)]
        for value_id, value in enumerate(self.values):
            if value.local or value_id not in last:
                continue
            # a written input is read from the arguments by the stage that writes it
            made = first.get(value_id, 0) if value.node < 0 else position[value.node]
            for cut in range(made + 1, last[value_id] + 1):
                live[cut].append(value_id)
        return live

    def _legal(self) -> np.ndarray:
        """Memory that is written stays on one stage up to its last write.

        Views of it alias each other there, and an in-place operation on a received tensor that
        requires grad would raise. A written parameter or buffer has all its users on one stage.
        """
        num_pieces = len(self.pieces)
        legal = np.ones(num_pieces + 1, bool)
        users: dict[int | str, list[int]] = {}
        writers: dict[int, list[int]] = {}
        for piece, index in enumerate(self.pieces):
            for key in self._touched(self.nodes[index]):
                users.setdefault(key, []).append(piece)
            for storage in self.nodes[index].writes:
                writers.setdefault(storage, []).append(piece)
        for storage, pieces in writers.items():
            first = min(users.get(storage, []) + pieces)
            legal[first + 1 : max(pieces) + 1] = False
        for name in self.dirty_state:
            legal[users[name][0] + 1 : users[name][-1] + 1] = False
        drawn: dict[int, list[int]] = {}
        for piece, index in enumerate(self.pieces):
            for generator in self.nodes[index].generators:
                drawn.setdefault(generator, []).append(piece)
        for pieces in drawn.values():
            legal[pieces[0] + 1 : pieces[-1] + 1] = False
        return legal

    def _touched(self, node: Node) -> set[int | str]:
        values = [*node.operands, *(value for _, value in node.outputs)]
        storages = {self.values[value].storage for value in values}
        names = {self.storage_names[s] for s in storages if s in self.storage_names}
        return storages | names | set(node.state)

    def _reads(self) -> list[frozenset[str]]:
        """State of each piece and of the local nodes that its stage repeats for it."""
        reads = []
        for index in self.pieces:
            node = self.nodes[index]
            reads.append(frozenset(node.state) | self._local_state(node.operands))
        if reads:
            reads[-1] |= self._local_state(self.outputs)
        return reads

    def _local_state(self, values: list[int]) -> frozenset[str]:
        names: set[str] = set()
        seen: set[int] = set()
        todo = [value for value in values if self.values[value].local]
        while todo:
            index = self.values[todo.pop()].node
            if index >= 0 and index not in seen:
                seen.add(index)
                names.update(self.nodes[index].state)
                todo += self.nodes[index].operands
        return frozenset(names)
