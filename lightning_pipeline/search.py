"""Searching an order of work for measured times and limited memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.orders import Lists, gradients_first
from lightning_pipeline.packing import Costs, pack
from lightning_pipeline.schedules import SCHEDULES, Placement, Schedule, require_count
from lightning_pipeline.simulate import Deadlock, Span, Timeline, peak_bytes, simulate

_REACH = 6
"""How far an action is moved on the critical path, in actions."""


def search_order(
    costs: Costs,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    placement: Placement = "loop",
    effort: int = 400_000,
) -> Lists:
    """Searches action lists that take no longer than those of any schedule that fits the memory.

    It starts from all schedules of the table, splits their backwards, does what stands later
    wherever a rank would wait, by several rules, and then moves actions on the critical path of
    the best order as long as that helps. The result follows from the arguments alone: every rank
    that calls it with the same ones gets the same lists.

    Example:
        >>> costs = Costs([StageTime(1, 1, 1)] * 4, bytes=[StageBytes(1, 1)] * 4, limits=[4] * 4)
        >>> simulate(search_order(costs, 4, 1, 8), costs.times).makespan
        27.0

    Args:
        costs: Times, messages, bytes and limits.
        ranks: Number of ranks in one pipeline.
        stages_per_rank: Number of stages that each rank holds.
        microbatches: Number of microbatches in a step.
        placement: How the stages lie on the ranks, as in the table of schedules.
        effort: Bound of the work: the actions that all orders together are made of. About 0.1
            million a second.

    Returns:
        For each rank of the pipeline, its actions in order.

    Raises:
        ValueError: If not even one microbatch at a time fits the memory, or a time is no number of
            seconds.
    """
    for stage, time in enumerate(costs.times):
        if not all(0 <= value < float("inf") for value in time):
            raise ValueError(
                f"Times must be seconds, got {tuple(time)} for stage {stage}. They come from the "
                "costs. Set finite numbers of at least 0."
            )
    for name, count in (
        ("ranks", ranks),
        ("stages_per_rank", stages_per_rank),
        ("microbatches", microbatches),
    ):
        require_count(name, count)
    return _Search(costs, ranks, stages_per_rank, microbatches, placement, effort).run()


class _Search:
    def __init__(
        self,
        costs: Costs,
        ranks: int,
        stages_per_rank: int,
        microbatches: int,
        placement: Placement,
        effort: int,
    ) -> None:
        self._costs, self._sizes = costs, (ranks, stages_per_rank, microbatches)
        self._placement, self._left = placement, effort
        assert len(costs.times) == ranks * stages_per_rank

    def run(self) -> Lists:
        known = sorted(self._fitting(self._known()), key=self._score)
        if not known:
            raise ValueError(self._too_small())
        best = known[0]
        half = self._left // 2
        for lists in known:
            for rule in (None, gradients_first, self._longest_way_first):
                for looks_ahead in (False, True):
                    if self._left < half:
                        break
                    for packed in self._fitting([pack(lists, self._costs, rule, looks_ahead)]):
                        best = min(best, packed, key=self._score)
        return self._improve(best)

    def _simulate(self, lists: Lists) -> Timeline:
        self._left -= sum(map(len, lists))
        costs = self._costs
        return simulate(lists, costs.times, costs.message, costs.reductions)

    def _score(self, lists: Lists) -> tuple[float, float]:
        return _score(self._simulate(lists))

    # where it starts

    def _known(self) -> Iterator[Lists]:
        """The orders of all schedules that have these stages, and one microbatch after another."""
        ranks, depth, microbatches = self._sizes
        for entry in SCHEDULES:
            high = depth if entry.max_stages_per_rank is None else entry.max_stages_per_rank
            if entry.placement != self._placement or not entry.min_stages_per_rank <= depth <= high:
                continue
            if entry.allows_microbatches(microbatches, ranks, depth):
                lists = action_lists(entry, *self._sizes)
                yield lists
                yield [[part for action in row for part in _parts(action)] for row in lists]
        yield self._one_by_one()

    def _one_by_one(self) -> Lists:
        ranks, depth, microbatches = self._sizes
        place = Schedule("", "", placement=self._placement)
        rows = []
        for rank in range(ranks):
            held = place.stages_of_rank(rank, ranks, depth)
            there = [("F", stage) for stage in held]
            back = [(op, stage) for stage in reversed(held) for op in "IW"]
            rows.append(
                [Action(s, op, m) for m in range(microbatches) for op, s in (*there, *back)]  # type: ignore[arg-type]
            )
        return rows

    def _fitting(self, orders: Sequence[Lists] | Iterator[Lists]) -> list[Lists]:
        """Those that fit the memory, each once."""
        found: list[Lists] = []
        for lists in orders:
            if lists not in found and all(map(self._fits, range(len(lists)), lists)):
                found.append(lists)
        return found

    def _fits(self, rank: int, row: Sequence[Action]) -> bool:
        limits = self._costs.limits
        return not limits or peak_bytes(row, self._costs.bytes)[0] <= limits[rank]

    def _too_small(self) -> str:
        limits = self._costs.limits
        needed = [peak_bytes(row, self._costs.bytes)[0] for row in self._one_by_one()]
        rank = next(i for i, row in enumerate(needed) if row > limits[i])
        return (
            f"Each rank must hold the activations of at least one microbatch, got a limit of "
            f"{limits[rank]:g} bytes for the {needed[rank]:g} of rank {rank}. They come from the "
            "bytes and limits of the costs. Set smaller microbatches, more stages, recomputation, "
            f"or a limit of {needed[rank]:g} bytes."
        )

    # rules

    def _longest_way_first(self, action: Action) -> tuple[float, ...]:
        """What the rest of a microbatch takes if nothing waits, the longest first."""
        times, (stage, op, m) = self._costs.times, action
        if op == "W":
            return 0.0, m
        way = sum(time.of("I") for time in times[: stage + 1])
        if op == "F":
            way += sum(time.forward for time in times[stage:])
            way += sum(time.of("I") for time in times[stage + 1 :])
        return -way, m

    # moves

    def _improve(self, best: Lists) -> Lists:
        """Moves actions on the critical path as long as that helps and the effort lasts."""
        timeline = self._simulate(best)
        found = True
        while found and self._left > 0:
            found = False
            for rank, at, to in _moves(timeline):
                if self._left <= 0:
                    break
                row = list(best[rank])
                row.insert(to, row.pop(at))
                if not (_is_in_order(row, best[rank][at]) and self._fits(rank, row)):
                    continue
                moved = [row if i == rank else other for i, other in enumerate(best)]
                try:
                    tried = self._simulate(moved)
                except Deadlock:
                    continue
                if _score(tried) < _score(timeline):
                    best, timeline, found = moved, tried, True
                    break
        return best


def _parts(action: Action) -> list[Action]:
    """A whole backward as its two parts."""
    stage, op, m = action
    return [Action(stage, "I", m), Action(stage, "W", m)] if op == "B" else [action]


def _is_in_order(row: Sequence[Action], moved: Action) -> bool:
    """Whether the forwards of a stage are still one microbatch after the other."""
    stage, op, _ = moved
    done = [m for s, o, m in row if s == stage and o == op]
    return op != "F" or done == sorted(done)


def _score(timeline: Timeline) -> tuple[float, float]:
    """The time of the step, then how early the ranks are through."""
    return timeline.makespan, sum(row[-1].end for row in timeline.spans if row)


def _moves(timeline: Timeline) -> Iterator[tuple[int, int, int]]:
    """Rank, place and new place of actions whose move could shorten the critical path.

    Only another order within a block, a run of actions of one rank on the path, can: what ends the
    block is moved up, and what begins it down.

    Source: Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop Problem, 1996.
    """
    for rank, first, last in _blocks(timeline):
        for to in range(last - 1, max(first, last - _REACH) - 1, -1):
            yield rank, last, to
        for to in range(first + 1, min(last, first + _REACH) + 1):
            yield rank, first, to


def _blocks(timeline: Timeline) -> Iterator[tuple[int, int, int]]:
    """Runs of actions without a gap on the critical path, from the end: rank, first and last."""
    places = {
        span.action: (rank, at)
        for rank, row in enumerate(timeline.spans)
        for at, span in enumerate(row)
    }
    place: tuple[int, int] | None = places[_last(timeline).action]
    while place is not None:
        rank, last = place
        row, first = timeline.spans[rank], last
        while first and row[first - 1].end == row[first].start:
            first -= 1
        yield rank, first, last
        stage, op, m = row[first].action
        before = [(stage - 1, "F")] if op == "F" else [(stage + 1, "B"), (stage + 1, "I")]
        makers = (places.get(Action(s, kind, m)) for s, kind in before)  # type: ignore[arg-type]
        place = None if op == "W" else next(filter(None, makers), None)


def _last(timeline: Timeline) -> Span:
    """The action behind which the step ends, or the reductions that end it begin."""
    reductions = timeline.reductions or ((),) * len(timeline.spans)
    rows = [pair for pair in zip(timeline.spans, reductions, strict=True) if pair[0]]
    row, own = max(rows, key=lambda pair: max(each[-1].end for each in pair if each))
    if not own or row[-1].end >= own[-1].end:
        return row[-1]
    first = len(own) - 1
    while first and own[first - 1].end == own[first].start:
        first -= 1
    return max((s for s in row if s.action.stage == own[first].stage), key=lambda s: s.end)
