"""The exactly balanced cut of a sequence, by dynamic programming over the places it can use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-9
"""Relative difference below which two largest stages count as equal."""

_SLACK = 1e-12
"""Bound on the rounding of a stage's load, relative to that of the whole sequence."""

_FEW = 32
"""Begins of a stage that are kept to find a price that can be had."""

_Price = tuple[float, float]
"""Bytes, with empty stages as more than all bytes, and sum of squared stage costs."""

_Keys = tuple[np.ndarray, np.ndarray]
"""Place of each value in ascending order, counted from 1, and the values in order behind -inf."""


class Pairs(NamedTuple):
    """Begins and ends of one stage, sorted by end and then by begin, and its load for each."""

    begin: np.ndarray
    end: np.ndarray
    load: np.ndarray

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """First pair of each end, and how many pairs it has."""
        first = np.flatnonzero(np.r_[True, self.end[1:] != self.end[:-1]])
        return first, np.diff(np.r_[first, len(self.end)])


class Balance:
    """Ways to cut a sequence at K places into S stages.

    A stage from place i to place j has the load ``ahead[j] - ahead[i]``, plus the time of the bytes
    at i and, but for the last stage, at j. What no best cut can use is left out early, by bounds
    that take K log K steps for each stage.

    Args:
        ahead: float [K], seconds of all pieces before each place; the last place is the end.
        crossing: float [K], bytes that cross each place.
        runs: int [S, K], ascending; a stage has no piece between places of different runs.
        seconds_per_byte: Time to send one byte, in seconds.
    """

    def __init__(
        self, ahead: np.ndarray, crossing: np.ndarray, runs: np.ndarray, seconds_per_byte: float
    ) -> None:
        self._ahead, self._crossing, self._runs = ahead, crossing, runs
        self._seconds = seconds_per_byte * crossing
        self._num_stages = len(runs)
        self._begins = ahead - self._seconds
        self._ends = [ahead + self._seconds] * (self._num_stages - 1) + [ahead]
        self._whole = float(ahead[-1] + self._seconds.max())

    def cut(self) -> list[int]:
        """Places of the S - 1 cuts, the best as `partition` says."""
        low, high = self._bracket()
        slack = _SLACK * self._whole
        limit = high * (1 + 2 * TOLERANCE) + slack
        places = self._places(limit)
        least = self._smallest_maximum(places, low - 2 * slack, limit)
        return self._cheapest(places, least * (1 + TOLERANCE))

    def _bracket(self) -> tuple[float, float]:
        """Bounds of the least possible largest load, right but for rounding."""
        keys = _ranked(self._begins)
        low, high = float(self._ahead[-1]) / self._num_stages, 2 * self._whole
        while high - low > TOLERANCE / 10 * high:
            middle = (low + high) / 2
            reached = _only(0, len(self._ahead))
            for runs, ends in zip(self._runs, self._ends, strict=True):
                reached = _reach(reached, keys, ends, runs, middle)
            low, high = (low, middle) if reached[-1] else (middle, high)
        return low, high

    def _places(self, limit: float) -> list[np.ndarray]:
        """Where each stage may begin, and the last one end, with no load above ``limit``."""
        count, keys = len(self._ahead), _ranked(self._begins)
        forward, backward = [_only(0, count)], [_only(0, count)]
        for runs, ends in zip(self._runs, self._ends, strict=True):
            forward.append(_reach(forward[-1], keys, ends, runs, limit))
        for runs, ends in zip(self._runs[::-1], self._ends[::-1], strict=True):
            mirrored = _ranked(-ends[::-1]), -self._begins[::-1], (runs[-1] - runs)[::-1]
            backward.append(_reach(backward[-1], *mirrored, limit))
        both = zip(forward, reversed(backward), strict=True)
        return [np.flatnonzero(there & back[::-1]) for there, back in both]

    def _pairs(
        self, stage: int, begins: np.ndarray, ends: np.ndarray, least: float, limit: float
    ) -> Pairs:
        """Those of one stage with at least so much work, and no load above ``limit``."""
        runs = self._runs[stage]
        first = np.searchsorted(self._ahead, self._ahead[ends] - limit)
        first = np.maximum(first, np.searchsorted(runs, runs[ends]))
        last = np.searchsorted(self._ahead, self._ahead[ends] - least, side="right")
        low = np.searchsorted(begins, first)
        high = np.searchsorted(begins, np.minimum(last, ends + 1))
        sizes = np.maximum(high - low, 0)
        offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        begin, end = begins[np.repeat(low, sizes) + offset], np.repeat(ends, sizes)
        load = self._ahead[end] - self._ahead[begin] + self._seconds[begin]
        if stage < self._num_stages - 1:
            load = load + self._seconds[end]
        fits = load <= limit
        return Pairs(begin[fits], end[fits], load[fits])

    def _smallest_maximum(
        self, places: Sequence[np.ndarray], surely_below: float, limit: float
    ) -> float:
        """The least possible largest load of a stage, over all ways to cut.

        It is the load of some stage, and those near the bound are few.

        Args:
            places: Where each stage may begin, and the last one end.
            surely_below: A load that is smaller.
            limit: A load that is not.
        """
        keys, send = _ranked(self._begins), 2 * self._seconds.max()
        least = surely_below - send - _SLACK * self._whole
        near = [
            self._pairs(stage, begins, ends, least, limit)
            for stage, (begins, ends) in enumerate(pairwise(places))
        ]
        loads = np.unique(np.concatenate([pairs.load for pairs in near]))

        def is_enough(load: float) -> bool:
            reached = _only(0, len(self._ahead))
            for pairs, runs, ends in zip(near, self._runs, self._ends, strict=True):
                before, reached = reached, _reach(reached, keys, ends, runs, surely_below)
                reached[pairs.end[before[pairs.begin] & (pairs.load <= load)]] = True
            return bool(reached[-1])

        return float(loads[bisect_left(loads, True, hi=len(loads) - 1, key=is_enough)])

    def _cheapest(self, places: Sequence[np.ndarray], limit: float) -> list[int]:
        """Cuts with no load above ``limit`` that are best otherwise.

        A first search that keeps few ways tells the second one which need not be looked at.
        """
        rest = Rest(self._ahead, self._crossing, places, limit)
        _, bound = self._search(places, limit, rest, None)
        cuts, _ = self._search(places, limit, rest, bound)
        return cuts

    def _search(
        self, places: Sequence[np.ndarray], limit: float, rest: Rest, bound: _Price | None
    ) -> tuple[list[int], _Price]:
        """The best cuts that go through the begins that are kept, and their price.

        Args:
            places: Where each stage may begin, and the last one end.
            limit: No load is above it.
            rest: What the stages behind a begin cost at least.
            bound: A price that can be had; ``None`` keeps the most promising begins alone.
        """
        count, crossing = len(self._ahead), self._crossing
        total, uneven = np.full(count, np.inf), np.full(count, np.inf)
        total[0] = uneven[0] = 0.0
        steps, begins = [], places[0]
        for stage in range(self._num_stages):
            begin, end, _ = pairs = self._pairs(stage, begins, places[stage + 1], -np.inf, limit)
            groups, sizes = pairs.groups()
            # the bytes of a cut count once, with the stage that receives them
            nbytes = (
                total[begin] + (crossing[begin] if stage else 0.0) + rest.empty * (begin == end)
            )
            squares = uneven[begin] + (self._ahead[end] - self._ahead[begin]) ** 2
            least = np.minimum.reduceat(nbytes, groups)
            squares[nbytes > np.repeat(least, sizes)] = np.inf
            evenest = np.minimum.reduceat(squares, groups)
            hits = np.flatnonzero(squares == np.repeat(evenest, sizes))
            came_from = np.zeros(count, int)
            came_from[end[hits[::-1]]] = begin[hits[::-1]]  # the first one wins
            steps.append(came_from)
            total, uneven = np.full(count, np.inf), np.full(count, np.inf)
            begins = end[groups]
            total[begins], uneven[begins] = least, evenest
            begins = rest.promising(stage + 1, begins, total, uneven, bound)
        cuts, position = [], count - 1
        for came_from in reversed(steps[1:]):
            position = int(came_from[position])
            cuts.append(position)
        return cuts[::-1], (float(total[-1]), float(uneven[-1]))


class Rest:
    """What the stages that are left cost at least.

    Args:
        ahead: float [K], as for `Balance`.
        crossing: float [K], likewise.
        places: Where each stage may begin, and the last one end.
        limit: Most work of a stage, in seconds.

    Attributes:
        empty: Price of an empty stage, more than all bytes of any way to cut.
    """

    def __init__(
        self, ahead: np.ndarray, crossing: np.ndarray, places: Sequence[np.ndarray], limit: float
    ) -> None:
        count, self._num_stages, self._crossing = len(ahead), len(places) - 1, crossing
        self._work = ahead[-1] - ahead
        self._unit = np.r_[np.maximum.accumulate(np.diff(ahead)[::-1])[::-1], 0.0]
        self.empty = 1.0 + crossing.max() * self._num_stages
        next_place = np.arange(1, count + 1)
        reach = np.searchsorted(ahead, ahead + limit + _SLACK * ahead[-1], side="right")
        behind = np.where(_only(count - 1, count), 0.0, np.inf)
        self._bytes = [behind]
        for begins in places[-2::-1]:
            least = np.minimum(_range_min(behind, next_place, reach), behind + self.empty)
            self._bytes.append(least)
            behind = np.full(count, np.inf)
            behind[begins] = least[begins] + crossing[begins]

    def _squares(self, begins: np.ndarray, num_left: int) -> np.ndarray:
        """Least sum of squares: even but for one stage that has the largest piece to itself."""
        work, unit = self._work[begins], self._unit[begins]
        if num_left < 2:
            return work**2 if num_left else np.zeros(len(begins))
        largest = np.maximum(unit, work / num_left)
        least: np.ndarray = largest**2 + (work - largest) ** 2 / (num_left - 1)
        return least

    def promising(
        self,
        stage: int,
        begins: np.ndarray,
        total: np.ndarray,
        uneven: np.ndarray,
        bound: _Price | None,
    ) -> np.ndarray:
        """Begins of a stage that may lead to a price of at most ``bound``, in order.

        Args:
            stage: The stage.
            begins: Where it may begin.
            total: float [K], bytes and empty stages of the best way to each place.
            uneven: float [K], its squares.
            bound: The price; ``None`` takes the best few by what they lead to at least.
        """
        num_left = self._num_stages - stage
        nbytes = total[begins] + self._bytes[num_left][begins]
        nbytes += self._crossing[begins] if num_left else 0.0
        squares = uneven[begins] + self._squares(begins, num_left)
        if bound is None:
            return np.sort(begins[np.lexsort((squares, nbytes))[:_FEW]])
        fewest, evenest = (price * (1 + TOLERANCE) for price in bound)
        sure = nbytes < bound[0] * (1 - TOLERANCE)
        return begins[(nbytes <= fewest) & (sure | (squares <= evenest))]


def _range_min(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Least of ``values[low[k]:high[k]]`` for each k; infinite where there are none."""
    found = np.full(len(low), np.inf)
    size, table = 1, values  # table[k] is the least of values[k : k + size]
    while len(table):
        now = (high - low >= size) & (high - low < 2 * size)
        found[now] = np.minimum(table[low[now]], table[high[now] - size])
        table = np.minimum(table[:-size], table[size:]) if len(table) > size else table[:0]
        size *= 2
    return found


def _only(index: int, count: int) -> np.ndarray:
    return np.arange(count) == index


def _ranked(values: np.ndarray) -> _Keys:
    order = np.argsort(values, kind="stable")
    place = np.empty(len(values), int)
    place[order] = np.arange(1, len(values) + 1)
    return place, np.r_[-np.inf, values[order]]


def _reach(
    reached: np.ndarray, keys: _Keys, ends: np.ndarray, runs: np.ndarray, limit: float
) -> np.ndarray:
    """The places j with a reached i <= j of the same run that has ``ends[j] - key[i] <= limit``.

    Args:
        reached: bool [K].
        keys: The keys in order, as from `_ranked`.
        ends: float [K].
        runs: int [K], ascending.
        limit: As above.
    """
    place, values = keys
    # the largest key so far in each run: the first place of a run is above all of the last run
    begin = runs * len(values)
    largest = np.maximum.accumulate(begin + np.where(reached, place, 0)) - begin
    found: np.ndarray = ends - values[largest] <= limit
    return found
