"""One order for the pieces of all calls of a step, which any cut respects.

Pieces of independent calls that share a weight stand side by side, so that the weight lives on one
stage; so do all users of a buffer that is written. What then depends on itself in a circle becomes
one unit that is never cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import numpy as np

from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.pending import TensorMeta

Piece = tuple[int, int]  # (index of the call, index of the piece in it)
Precedence = tuple[frozenset[str], frozenset[str]]  # names whose users come before those of others


class _Groups:
    """Disjoint sets over 0 .. size - 1."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, first: int, second: int) -> None:
        self._parent[self.find(first)] = self.find(second)


class Order:
    """Units of pieces in an order that every cut respects.

    Args:
        calls: The step's calls.
        woven: Keep pieces of independent calls that share a parameter together. Without it such a
            parameter may have a replica on several stages.
        twins: Names of weights that are averaged copies, with their originals; pieces of
            independent calls that use the two are kept together, too.
        before: What shall come before what, although the calls do not ask for it.
        stages_of: Stages that hold given names, where the weights have been placed: of what may
            come next then comes first what is on an early one.

    Attributes:
        units: Pieces of each unit.
        cost: Seconds of each unit, shape [units].
        reads: Parameters and buffers of each unit.
        progress: Pieces of every call that lie before each cut, shape [units + 1][calls].
        bytes_at: Bytes that cross each cut, shape [units + 1].
    """

    def __init__(
        self,
        calls: list[Call],
        woven: bool,
        *,
        twins: Mapping[str, str] | None = None,
        before: Iterable[Precedence] = (),
        stages_of: Callable[[frozenset[str]], frozenset[int] | None] | None = None,
    ) -> None:
        self.calls, self._before, self._stages_of = calls, before, stages_of
        self._pieces = [(i, p) for i, call in enumerate(calls) for p in range(call.num_pieces)]
        self._number = {piece: n for n, piece in enumerate(self._pieces)}
        self._groups = _Groups(len(self._pieces))
        self._users: dict[str, list[Piece]] = defaultdict(list)
        for i, p in self._pieces:
            for name in calls[i].reads[p]:
                self._users[name].append((i, p))
        self._join_pieces(woven)
        self._join_twins(twins or {})
        self.units = self._sorted_units()
        self.cost = np.array([sum(calls[i].cost[p] for i, p in unit) for unit in self.units])
        self.reads = [
            frozenset().union(*(calls[i].reads[p] for i, p in unit)) for unit in self.units
        ]
        self.progress = [[0] * len(calls)]
        for unit in self.units:
            row = list(self.progress[-1])
            for i, _ in unit:
                row[i] += 1
            self.progress.append(row)
        self.bytes_at = np.array([self._bytes(row) for row in self.progress])

    @property
    def legal(self) -> np.ndarray:
        """Where the order may be cut, shape [units + 1]: everywhere, for units are whole."""
        return np.ones(len(self.units) + 1, dtype=bool)

    def names(self) -> list[str]:
        """Dotted module name of each unit's first piece."""
        names = []
        for unit in self.units:
            i, p = unit[0]
            call = self.calls[i]
            inner = call.program.piece_names[p] if call.program is not None else ""
            names.append(".".join(part for part in (call.name, inner) if part))
        return names

    def _join_pieces(self, woven: bool) -> None:
        writes = frozenset().union(*(call.writes for call in self.calls))
        for name, pieces in self._users.items():
            for first, second in pairwise(pieces):
                if name in writes or (woven and self._independent(first[0], second[0])):
                    self._groups.join(self._number[first], self._number[second])
        for i, call in enumerate(self.calls):
            if call.program is None:
                continue
            for p in range(1, call.num_pieces):
                if not call.program.legal[p]:
                    self._groups.join(self._number[i, p - 1], self._number[i, p])

    def _join_twins(self, twins: Mapping[str, str]) -> None:
        for pair in twins.items():
            if all(name in self._users for name in pair):
                (copied, *_), (original, *_) = (self._users[name] for name in pair)
                if self._independent(copied[0], original[0]):
                    self._groups.join(self._number[copied], self._number[original])

    def _independent(self, first: int, second: int) -> bool:
        """Whether neither call uses the other's output; a call depends on itself."""
        if first == second:
            return False
        return not self._reaches(first, second) and not self._reaches(second, first)

    def _reaches(self, first: int, second: int) -> bool:
        return first in self.calls[second].depends_on

    def _edges(self) -> dict[int, set[int]]:
        edges: dict[int, set[int]] = defaultdict(set)

        def edge(before: Piece, after: Piece) -> None:
            a = self._groups.find(self._number[before])
            b = self._groups.find(self._number[after])
            if a != b:
                edges[a].add(b)

        for i, call in enumerate(self.calls):
            for p in range(1, call.num_pieces):
                edge((i, p - 1), (i, p))
            for source in call.depends_on:
                edge((source, self.calls[source].num_pieces - 1), (i, 0))
        for earlier, later in self._before:
            for first in {piece for name in earlier for piece in self._users.get(name, ())}:
                for second in {piece for name in later for piece in self._users.get(name, ())}:
                    edge(first, second)
        return edges

    def _sorted_units(self) -> list[list[Piece]]:
        """Strongly connected groups, in topological order, ties by the original order."""
        edges = self._edges()
        roots = sorted({self._groups.find(n) for n in range(len(self._pieces))})
        component = _components(roots, edges)
        members: dict[int, list[Piece]] = defaultdict(list)
        for piece in self._pieces:
            members[component[self._groups.find(self._number[piece])]].append(piece)
        after: dict[int, set[int]] = {unit: set() for unit in members}
        waiting = dict.fromkeys(members, 0)
        for a, successors in edges.items():
            for b in successors:
                if component[a] != component[b] and component[b] not in after[component[a]]:
                    after[component[a]].add(component[b])
                    waiting[component[b]] += 1
        ready = [unit for unit in members if not waiting[unit]]
        ordered = []
        while ready:
            unit = min(ready, key=lambda u: (self._stage(members[u]), self._number[members[u][0]]))
            ready.remove(unit)
            ordered.append(members[unit])
            for following in after[unit]:
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
        return ordered

    def _stage(self, unit: list[Piece]) -> int:
        """The first stage that holds the weights of a unit, -1 if it does not matter."""
        if self._stages_of is None:
            return -1
        reads = frozenset().union(*(self.calls[i].reads[p] for i, p in unit))
        return min(self._stages_of(reads) or (), default=-1)

    def _bytes(self, row: list[int]) -> float:
        total = 0
        for call, done in zip(self.calls, row, strict=True):
            if done == call.num_pieces:
                total += sum(o.nbytes for o in call.outputs if isinstance(o, TensorMeta))
            elif done:
                assert call.program is not None
                total += sum(call.program.values[v].nbytes for v in call.program.live[done])
        return float(total)


def _components(nodes: Iterable[int], edges: dict[int, set[int]]) -> dict[int, int]:
    """Number of the strongly connected component of each node (Tarjan 1972, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    component: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in nodes:
        if root in index:
            continue
        work = [(root, iter(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            following = next(successors, None)
            if following is None:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    number = len(component)
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component[member] = number
                        if member == node:
                            break
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                on_stack.add(following)
                work.append((following, iter(edges.get(following, ()))))
            elif following in on_stack:
                low[node] = min(low[node], index[following])
    return component
