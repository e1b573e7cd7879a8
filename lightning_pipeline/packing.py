"""Orders without avoidable gaps: what stands later is done where a rank would wait."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_pipeline.actions import Action
from lightning_pipeline.simulate import Link, StageBytes, StageTime, Wires, makes, needs, peak_bytes

Rule = Callable[[Action], tuple[float, ...]]
"""What is done first among the actions that could begin: the smallest."""


@dataclass(frozen=True)
class Costs:
    """What orders are judged by.

    Attributes:
        times: For each stage, its durations in seconds.
        message: What a message to another rank passes through; a number is a latency in seconds.
        bytes: For each stage, what it keeps of one microbatch; empty: nothing.
        limits: For each rank, the bytes that it may hold of that at once; empty: any number.
        reductions: For each stage, the time that the reduction of its gradients takes, in seconds.
    """

    times: Sequence[StageTime]
    message: float | Link = 0.0
    bytes: Sequence[StageBytes] = ()
    limits: Sequence[float] = ()
    reductions: Sequence[float] | None = None


def pack(
    lists: Sequence[Sequence[Action]],
    costs: Costs,
    rule: Rule | None = None,
    looks_ahead: bool = False,
) -> list[list[Action]]:
    """Lets each rank do what stands later in its list where it would wait, or by a rule.

    The lists say what is kept in memory: an action goes before others only if the rank can still
    do all of them in their order within its limit. So there is always a way on.

    Args:
        lists: For each rank of one pipeline, what it computes, in a legal order within the limits.
        costs: What the lists are judged by.
        rule: Which of the actions that could begin does; ``None``: the one that stands first.
        looks_ahead: Whether an action may not begin that would still run when the first of the
            list is known to be able to.

    Returns:
        The same actions in another order.
    """
    return _Packing(lists, costs, rule, looks_ahead).run()


class _Packing:
    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        costs: Costs,
        rule: Rule | None,
        looks_ahead: bool,
    ) -> None:
        self._costs, self._rule, self._looks_ahead = costs, rule, looks_ahead
        self._num_stages = len(costs.times)
        self._ranks = [_Rank(row, costs, rank) for rank, row in enumerate(lists)]
        self._rank_of = {a.stage: rank for rank, row in enumerate(lists) for a in row}
        self._wires = Wires(lists, self._num_stages, costs.message)
        self._ready: dict[tuple[int, str, int], float] = {}
        self._events = [(0.0, rank) for rank in range(len(lists))]

    def run(self) -> list[list[Action]]:
        while self._events:
            now, index = heapq.heappop(self._events)
            rank = self._ranks[index]
            while rank.left and rank.free <= now:
                action = self._choose(rank, now)
                if action is None:
                    break
                self._begin(rank, index, action, now)
        assert not any(rank.left for rank in self._ranks), "the lists are not legal"
        return [rank.done for rank in self._ranks]

    def _begin(self, rank: _Rank, index: int, action: Action, now: float) -> None:
        rank.take(action)
        rank.free = end = now + self._costs.times[action.stage].of(action.op)
        arrival = self._wires.arrival(action, index, end)
        self._ready[makes(action)] = arrival
        heapq.heappush(self._events, (end, index))
        stage = action.stage + (1 if action.op == "F" else -1)
        if action.op != "W" and stage in self._rank_of:
            heapq.heappush(self._events, (arrival, self._rank_of[stage]))

    def _due(self, action: Action) -> float:
        """When an action can begin; infinite if that is not known yet."""
        due = 0.0
        for value in needs(action, self._num_stages):
            if value not in self._ready:
                return float("inf")
            if value[0] != action.stage:
                due = max(due, self._ready[value])
        return due

    def _choose(self, rank: _Rank, now: float) -> Action | None:
        first = rank.first()
        due = self._due(first)
        if self._rule is None and due <= now:
            return first
        ready = [action for action in rank.fronts() if self._due(action) <= now]
        if self._looks_ahead and due < float("inf"):
            times = self._costs.times
            ready = [a for a in ready if a == first or now + times[a.stage].of(a.op) <= due]
        if self._rule is not None:
            ready.sort(key=self._rule)
        return next((action for action in ready if rank.allows(action)), None)


class _Rank:
    """What one rank has done and has left to do.

    Attributes:
        left: Number of actions that it has left.
        free: When it is through with what it does.
        done: What it has begun, in order.
    """

    def __init__(self, row: Sequence[Action], costs: Costs, rank: int) -> None:
        self._row, self._position = row, {action: at for at, action in enumerate(row)}
        self._queues: dict[tuple[int, str], deque[Action]] = defaultdict(deque)
        for action in row:
            self._queues[action.stage, action.op].append(action)
        self._taken, self._head = set[int](), 0
        self._bytes, self._held = costs.bytes, 0.0
        self._limit = costs.limits[rank] if costs.limits else float("inf")
        self.left, self.free = len(row), 0.0
        self.done: list[Action] = []

    def first(self) -> Action:
        """The action that stands first."""
        return self._row[self._head]

    def fronts(self) -> list[Action]:
        """The first action of each stage and operation, as they stand in the list."""
        fronts = [queue[0] for queue in self._queues.values() if queue]
        return sorted(fronts, key=self._position.__getitem__)

    def allows(self, action: Action) -> bool:
        """Whether what stands before an action still fits behind it."""
        if self._limit == float("inf") or action.op == "W" or action == self.first():
            return True
        before = range(self._head, self._position[action])
        then = [action, *(self._row[at] for at in before if at not in self._taken)]
        return peak_bytes(then, self._bytes, self._held)[0] <= self._limit

    def take(self, action: Action) -> None:
        """Does an action."""
        position = self._position[action]
        self._taken.add(position)
        while self._head in self._taken:
            self._taken.remove(self._head)
            self._head += 1
        self._queues[action.stage, action.op].popleft()
        if self._bytes:
            self._held = peak_bytes([action], self._bytes, self._held)[1]
        self.done.append(action)
        self.left -= 1
