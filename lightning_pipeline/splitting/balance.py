"""The exactly balanced cut of a sequence, by dynamic programming over the places it can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-9
"""Relative difference below which two largest stages count as equal."""

_SLACK = 1e-12
"""Bound on the rounding of a stage's load, relative to that of the whole sequence."""

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

    def within(self, limit: float) -> Pairs:
        """Those whose load is at most ``limit``."""
        fits = self.load <= limit
        return Pairs(self.begin[fits], self.end[fits], self.load[fits])


class Balance:
    """Ways to cut a sequence at K places into S stages.

    A stage from place i to place j has the load ``ahead[j] - ahead[i]``, plus the time of the bytes
    at i and, but for the last stage, at j. Only places that a cut with the least largest load can
    use are looked at, which are few if the stages can be balanced at all.

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
        limit = self._bound() * (1 + 2 * TOLERANCE) + _SLACK * self._whole
        places = self._places(limit)
        least = self._smallest_maximum(places, limit)
        return self._cheapest(places, least * (1 + TOLERANCE))

    def _bound(self) -> float:
        """The least possible largest load but for rounding, from above."""
        keys = _ranked(self._begins)
        low, high = float(self._ahead[-1]) / self._num_stages, 2 * self._whole
        while high - low > TOLERANCE / 10 * high:
            middle = (low + high) / 2
            reached = _only(0, len(self._ahead))
            for runs, ends in zip(self._runs, self._ends, strict=True):
                reached = _reach(reached, keys, ends, runs, middle)
            low, high = (low, middle) if reached[-1] else (middle, high)
        return high

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

    def _pairs(self, places: Sequence[np.ndarray], limit: float) -> Iterator[Pairs]:
        """For each stage the pairs of its places with no load above ``limit``."""
        for stage, runs in enumerate(self._runs):
            begins, ends = places[stage], places[stage + 1]
            nearest = np.searchsorted(self._ahead, self._ahead[ends] - limit)
            nearest = np.maximum(nearest, np.searchsorted(runs, runs[ends]))
            low = np.searchsorted(begins, nearest)
            sizes = np.maximum(np.searchsorted(begins, ends, side="right") - low, 0)
            offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            begin, end = begins[np.repeat(low, sizes) + offset], np.repeat(ends, sizes)
            load = self._ahead[end] - self._ahead[begin] + self._seconds[begin]
            if stage < self._num_stages - 1:
                load = load + self._seconds[end]
            yield Pairs(begin, end, load).within(limit)

    def _smallest_maximum(self, places: Sequence[np.ndarray], limit: float) -> float:
        """The least possible largest load of a stage, over all ways to cut."""
        best = np.full(len(self._ahead), np.inf)
        best[0] = 0.0
        for pairs in self._pairs(places, limit):
            groups, _ = pairs.groups()
            least = np.minimum.reduceat(np.maximum(best[pairs.begin], pairs.load), groups)
            best = np.full(len(best), np.inf)
            best[pairs.end[groups]] = least
        return float(best[-1])

    def _cheapest(self, places: Sequence[np.ndarray], limit: float) -> list[int]:
        """Cuts with no load above ``limit`` that are best otherwise."""
        count, crossing = len(self._ahead), self._crossing
        empty = 1.0 + crossing.max() * self._num_stages  # more than all bytes of any way to cut
        total, uneven = np.full(count, np.inf), np.full(count, np.inf)
        total[0] = uneven[0] = 0.0
        steps = []
        for stage, pairs in enumerate(self._pairs(places, limit)):
            begin, end, _ = pairs
            groups, sizes = pairs.groups()
            # the bytes of a cut count once, with the stage that receives them
            nbytes = total[begin] + (crossing[begin] if stage else 0.0) + empty * (begin == end)
            squares = uneven[begin] + (self._ahead[end] - self._ahead[begin]) ** 2
            least = np.minimum.reduceat(nbytes, groups)
            squares[nbytes > np.repeat(least, sizes)] = np.inf
            evenest = np.minimum.reduceat(squares, groups)
            hits = np.flatnonzero(squares == np.repeat(evenest, sizes))
            came_from = np.zeros(count, int)
            came_from[end[hits[::-1]]] = begin[hits[::-1]]  # the first one wins
            steps.append(came_from)
            total, uneven = np.full(count, np.inf), np.full(count, np.inf)
            total[end[groups]], uneven[end[groups]] = least, evenest
        cuts, position = [], count - 1
        for came_from in reversed(steps[1:]):
            position = int(came_from[position])
            cuts.append(position)
        return cuts[::-1]


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
