"""Searched orders against known ones, and against all that there are."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.packing import Costs
from lightning_pipeline.schedules import SCHEDULES
from lightning_pipeline.search import search_order
from lightning_pipeline.simulate import Deadlock, Link, StageBytes, StageTime, peak_bytes, simulate


def makespan(lists: list[list[Action]], costs: Costs) -> float:
    return simulate(lists, costs.times, costs.message, costs.reductions).makespan


def fits(lists: list[list[Action]], costs: Costs) -> bool:
    limits = costs.limits or [float("inf")] * len(lists)
    return all(
        peak_bytes(row, costs.bytes)[0] <= limit
        for row, limit in zip(lists, limits, strict=True)
        if costs.bytes
    )


def known(costs: Costs, ranks: int, v: int, m: int, placement: str) -> dict[str, float]:
    """Times of the schedules that have these stages and fit the memory."""
    return {
        entry.name: makespan(lists, costs)
        for entry in SCHEDULES
        if entry.placement == placement
        if entry.min_stages_per_rank <= v <= (entry.max_stages_per_rank or v)
        if entry.allows_microbatches(m, ranks, v)
        for lists in [action_lists(entry, ranks, v, m)]
        if fits(lists, costs)
    }


def uneven(n: int) -> list[StageTime]:
    return [StageTime(1 + i % 3 / 4, 1.25 - i % 2 / 4, 0.75 + i % 4 / 8) for i in range(n)]


EVEN = StageTime(1, 1, 1)
CASES = {
    "equal": (4, 1, 8, "loop", lambda n: [EVEN] * n, 0.0, 8),
    "1f1b's memory": (4, 1, 8, "loop", lambda n: [EVEN] * n, 0.25, 4),
    "uneven": (4, 1, 12, "loop", uneven, 0.125, 5),
    "little memory": (4, 1, 8, "loop", uneven, 0.0, 2),
    "late messages": (3, 1, 9, "loop", uneven, 2.0, 6),
    "rounds": (3, 2, 9, "loop", uneven, 0.125, 9),
    "v": (4, 2, 8, "v", lambda n: [EVEN] * n, 0.0, 6),
    "uneven v": (4, 2, 10, "v", uneven, 0.125, 7),
    "one rank": (1, 2, 3, "v", uneven, 0.0, 6),
}


@pytest.mark.parametrize("case", CASES)
class TestEveryCase:
    def test_no_known_order_is_shorter(self, case: str) -> None:
        ranks, v, m, placement, times, message, limit = CASES[case]
        n = ranks * v
        costs = Costs(times(n), message, [StageBytes(1, 1)] * n, [limit] * ranks)
        found = search_order(costs, ranks, v, m, placement)
        assert makespan(found, costs) <= min(
            [float("inf"), *known(costs, *CASES[case][:4]).values()]
        )
        assert fits(found, costs)
        counts = Counter(action for row in found for action in row)
        assert set(counts.values()) == {1}
        for stage, k in itertools.product(range(n), range(m)):
            ops = {op for op in "FBIW" if Action(stage, op, k) in counts}
            assert ops in ({"F", "B"}, {"F", "I", "W"})

    def test_the_same_arguments_give_the_same_lists(self, case: str) -> None:
        ranks, v, m, placement, times, message, limit = CASES[case]
        n = ranks * v
        costs = Costs(times(n), message, [StageBytes(1, 1)] * n, [limit] * ranks)
        assert search_order(costs, ranks, v, m, placement) == search_order(
            costs, ranks, v, m, placement
        )


@pytest.mark.parametrize(
    ("case", "gain"), [("uneven", 0.01), ("late messages", 0.02), ("uneven v", 0.05)]
)
def test_uneven_stages_are_run_better_than_by_any_known_order(case: str, gain: float) -> None:
    ranks, v, m, placement, times, message, limit = CASES[case]
    n = ranks * v
    costs = Costs(times(n), message, [StageBytes(1, 1)] * n, [limit] * ranks)
    best = min(known(costs, ranks, v, m, placement).values())
    assert makespan(search_order(costs, ranks, v, m, placement), costs) < (1 - gain) * best


def every_row(stage: int, m: int) -> list[list[Action]]:
    """All orders of a stage's work whose backwards are split."""
    actions = [Action(stage, op, k) for k in range(m) for op in "FIW"]
    rows = []
    for row in itertools.permutations(actions):
        at = {action: i for i, action in enumerate(row)}
        if all(
            at[stage, "F", k] < at[stage, "I", k] < at[stage, "W", k]  # type: ignore[index]
            for k in range(m)
        ):
            rows.append(list(row))
    return rows


@pytest.mark.parametrize(
    "times",
    [
        [EVEN] * 2,
        [StageTime(1, 2, 1), StageTime(2, 1, 2)],
        [StageTime(3, 1, 1), StageTime(1, 1, 3)],
    ],
)
@pytest.mark.parametrize("message", [0.0, 0.5, Link(0.25, 2.0, [1.0])])
@pytest.mark.parametrize("limit", [1, 2])
def test_small_orders_are_the_shortest_of_all(times, message, limit) -> None:
    costs = Costs(times, message, [StageBytes(1, 1)] * 2, [limit] * 2)
    shortest = float("inf")
    rows = [
        [row for row in every_row(stage, 2) if peak_bytes(row, costs.bytes)[0] <= limit]
        for stage in range(2)
    ]
    for pair in itertools.product(*rows):
        try:
            shortest = min(shortest, makespan(list(pair), costs))
        except Deadlock:
            continue
    assert makespan(search_order(costs, 2, 1, 2), costs) == shortest


def test_reductions_count() -> None:
    """The first rank's long reduction is worth weight gradients that are early there."""
    costs = Costs([EVEN] * 4, reductions=[12.0, 0.0, 0.0, 0.0])
    assert makespan(search_order(costs, 4, 1, 8), costs) <= min(
        known(costs, 4, 1, 8, "loop").values()
    )


def test_little_memory_is_refused_with_both_numbers() -> None:
    costs = Costs([EVEN] * 2, bytes=[StageBytes(8e6, 2e6)] * 2, limits=[9e6, 4e6])
    with pytest.raises(ValueError) as error:
        search_order(costs, 2, 1, 4)
    parts = ["a limit of 4e+06 bytes for the 8e+06 of rank 1", "recomputation, or a limit of 8e+06"]
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("name", ["ranks", "stages_per_rank", "microbatches"])
def test_counts_are_checked(name: str) -> None:
    sizes = {"ranks": 2, "stages_per_rank": 1, "microbatches": 2, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        search_order(Costs([EVEN] * 2), **sizes)


def test_processes_agree() -> None:
    """Whatever the seed of their hashes."""
    code = (
        "from lightning_pipeline.packing import Costs;"
        "from lightning_pipeline.search import search_order;"
        "from lightning_pipeline.simulate import StageBytes, StageTime;"
        "times = [StageTime(1, 1.5, .7), StageTime(1.2, 1, 1), StageTime(.9, 1, 1.1)];"
        "print(search_order(Costs(times, .1, [StageBytes(1, 1)] * 3, [4] * 3), 3, 1, 6))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    times = [StageTime(1, 1.5, 0.7), StageTime(1.2, 1, 1), StageTime(0.9, 1, 1.1)]
    costs = Costs(times, 0.1, [StageBytes(1, 1)] * 3, [4] * 3)
    assert printed == f"{search_order(costs, 3, 1, 6)}\n"


def test_times_that_are_none_are_refused() -> None:
    for value in (float("inf"), float("nan"), -1.0):
        costs = Costs([StageTime(1, 1, 1), StageTime(1, value, 1)])
        with pytest.raises(ValueError, match=r"Times must be seconds, got .* for stage 1"):
            search_order(costs, 2, 1, 4)
