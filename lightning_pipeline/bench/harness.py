"""Times of things that run in turn in one process group, and their ratios.

Whatever changes with the hour (other jobs, clocks, caches) changes both sides of a ratio alike if
they alternate: A B A B, one turn each a round. All ranks begin a turn at one agreed instant of the
machine's clock, and it ends when the last rank does.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lightning_pipeline.bench.emulation import sleep_precisely

LEAD = 0.005
"""Seconds between the agreement on a turn's begin and the begin."""

_M_ARENA_MAX = -8


class Subject(Protocol):
    """Something that can take steps, on every rank of the process group."""

    def run(self, start: float, num_steps: int) -> float:
        """Waits for ``start``, takes the steps, returns when they ended; both on `now`."""


class Steps:
    """A subject that is one function.

    Args:
        step: Takes one step.
        num_threads: Threads of torch in it.
    """

    def __init__(self, step: Callable[[], Any], num_threads: int = 1) -> None:
        self._step, self._num_threads = step, num_threads

    def run(self, start: float, num_steps: int) -> float:
        """Takes the steps in this thread."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        sleep_until(start)
        for _ in range(num_steps):
            self._step()
        return now()


class Turn(NamedTuple):
    """One turn of a subject.

    Attributes:
        seconds: Wall time of one step, from the common begin to the end of the last rank.
        cpu_seconds: CPU time of one step, of all ranks and their threads together.
        collected: What each rank had to tell about the turn, by rank.
    """

    seconds: float
    cpu_seconds: float
    collected: list[Any]


class Spread(NamedTuple):
    """Median of some numbers, the quartiles around it and the extremes."""

    median: float
    low: float
    high: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def spread(numbers: Sequence[float]) -> Spread:
    """Median, quartiles and extremes of at least one number."""
    low, median, high = (
        statistics.quantiles(numbers, n=4, method="inclusive")
        if len(numbers) > 1
        else [numbers[0]] * 3
    )
    return Spread(median, low, high, min(numbers), max(numbers))


@dataclass
class Comparison:
    """The turns of all subjects, round by round.

    Attributes:
        turns: By name of the subject, its turns in the order of the rounds.
    """

    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def seconds(self, name: str) -> Spread:
        """Time of a step of one subject."""
        return spread([turn.seconds for turn in self.turns[name]])

    def cpu_seconds(self, name: str) -> Spread:
        """CPU time of a step of one subject, all ranks together."""
        return spread([turn.cpu_seconds for turn in self.turns[name]])

    def ratio(self, name: str, base: str) -> Spread:
        """Time of one subject over that of another, pair by pair."""
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        return spread([a.seconds / b.seconds for a, b in pairs])


def alternate(
    subjects: Mapping[str, Subject],
    *,
    rounds: int,
    warmup: int = 2,
    steps: int = 1,
    collect: Callable[[], Any] | None = None,
) -> Comparison:
    """Gives every subject a turn in each round and measures it; all ranks call it alike.

    Example:
        >>> found = alternate({"ours": ours, "theirs": theirs, "ours again": ours}, rounds=9)
        >>> print(found.ratio("ours", "theirs"), found.ratio("ours again", "ours"))

    Args:
        subjects: By name, in the order of their turns. One that is in it twice is its own control.
        rounds: Number of rounds that count, at least 1.
        warmup: Rounds before them.
        steps: Steps of a turn, between two barriers.
        collect: Called on each rank after each turn; what it returns is kept.

    Returns:
        The same on all ranks.
    """
    found = Comparison({name: [] for name in subjects})
    for index in range(warmup + rounds):
        for name, subject in subjects.items():
            turn = _turn(subject, steps, collect)
            if index >= warmup:
                found.turns[name].append(turn)
    return found


def _turn(subject: Subject, steps: int, collect: Callable[[], Any] | None) -> Turn:
    start = _reduced(now(), dist.ReduceOp.MAX) + LEAD
    cpu = time.process_time()
    end = subject.run(start, steps)
    cpu = time.process_time() - cpu
    end = _reduced(end, dist.ReduceOp.MAX)
    cpu = _reduced(cpu, dist.ReduceOp.SUM)
    collected: list[Any] = []
    if collect is not None:
        collected = [None] * dist.get_world_size()
        dist.all_gather_object(collected, collect())
    return Turn((end - start) / steps, cpu / steps, collected)


def _reduced(value: float, operation: Any) -> float:
    message = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(message, operation)
    return float(message)


def now() -> float:
    """Seconds on the monotonic clock, which all processes of a machine share."""
    return time.monotonic()


def sleep_until(instant: float) -> None:
    """Sleeps until ``instant`` of `now`, if that is still to come."""
    time.sleep(max(0.0, instant - now()))


def settle_process() -> None:
    """Makes this rank fit for measurements: precise sleeps, one heap for all threads, no chatter.

    Subjects have a thread each; with a heap each they would not get their memory alike.
    """
    sleep_precisely()
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
