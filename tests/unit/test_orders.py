"""Orders by definition, and orders whose gaps are closed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.orders import gradients_first
from lightning_pipeline.packing import Costs, pack
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import Link, StageBytes, StageTime, peak_bytes, simulate
from tests.unit.test_simulate_properties import SECONDS, SIZES, orders


def words(lists: list[list[Action]]) -> list[str]:
    return [" ".join(map(str, row)) for row in lists]


@pytest.mark.parametrize(
    ("name", "ranks", "m", "expected"),
    [
        (
            "ZBH1",
            2,
            3,
            ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
        ),
        (
            "ZBH2",
            2,
            4,
            [
                "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
                "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
            ],
        ),
        ("VHalf", 1, 1, ["0F0 1F0 1I0 1W0 0I0 0W0"]),
        ("VMin", 1, 1, ["0F0 1F0 1I0 0I0 1W0 0W0"]),
    ],
)
def test_orders(name: str, ranks: int, m: int, expected: list[str]) -> None:
    schedule = get_schedule(name)
    assert words(action_lists(schedule, ranks, schedule.default_stages_per_rank, m)) == expected


@pytest.mark.parametrize("m", range(1, 20))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_memory_of_any_sizes(ranks: int, m: int) -> None:
    """Also of fewer microbatches than the pipeline needs to be full."""
    limits = {
        "ZBH1": min(ranks, m),
        "ZBH2": min(2 * ranks - 1, m),
        "VHalf": 2 * min((ranks + 2) // 2, m),
        "VMin": 2 * min((ranks + 4) // 3, m),
    }
    for name, limit in limits.items():
        schedule = get_schedule(name)
        v = schedule.default_stages_per_rank
        lists = action_lists(schedule, ranks, v, m)
        timeline = simulate(lists, [StageTime(1, 1, 1)] * (ranks * v))
        assert max(timeline.peak_activations) <= limit, name


@st.composite
def packings(draw: st.DrawFn):
    lists, n = draw(orders())
    times = [StageTime(*(draw(SECONDS) for _ in range(4))) for _ in range(n)]
    link = Link(draw(SECONDS), draw(st.sampled_from([0.5, 1.0])), [draw(SIZES) for _ in range(n)])
    each = [StageBytes(*(draw(SIZES) for _ in range(3))) for _ in range(n)]
    limits = [peak_bytes(row, each)[0] for row in lists]
    rule = draw(st.sampled_from([None, gradients_first, lambda a: (a.microbatch, -a.stage)]))
    return lists, Costs(times, link, each, limits), rule, draw(st.booleans())


@given(packings())
@settings(max_examples=300)
def test_packed_orders_are_legal_and_keep_the_limits(case) -> None:
    lists, costs, rule, looks_ahead = case
    packed = pack(lists, costs, rule, looks_ahead)
    assert [Counter(row) for row in packed] == [Counter(row) for row in lists]
    simulate(packed, costs.times, costs.message)
    for row, limit in zip(packed, costs.limits, strict=True):
        assert peak_bytes(row, costs.bytes)[0] <= limit


@given(orders())
def test_equal_actions_are_never_packed_for_longer(order) -> None:
    lists, n = order
    costs = Costs([StageTime(1, 1, 0)] * n)
    unsplit = [[a for a in row if a.op != "W"] for row in lists]
    before = simulate(unsplit, costs.times).makespan
    assert simulate(pack(unsplit, costs), costs.times).makespan <= before


def test_what_stands_later_fills_gaps_within_the_limit() -> None:
    lists = action_lists(get_schedule("1F1B"), 2, 1, 4)
    times, each = [StageTime(1, 1, 1)] * 2, [StageBytes(1)] * 2
    assert words(pack(lists, Costs(times, bytes=each, limits=[3, 1])))[0].startswith(
        "0F0 0F1 0F2 0B0"
    )
    assert words(pack(lists, Costs(times, bytes=each, limits=[2, 1]))) == words(lists)


@pytest.mark.parametrize(("looks_ahead", "forwards"), [(False, 9), (True, 8)])
def test_looking_ahead_leaves_the_first_action_its_time(looks_ahead: bool, forwards: int) -> None:
    """The gradient comes at 25, the ninth forward would run from 24 to 27."""
    lists = [
        [Action(stage, op, m) for m in range(10) for op in ops]
        for stage, ops in ((0, "FIW"), (1, "FB"))
    ]
    costs = Costs([StageTime(3, 1, 1), StageTime(1, 0.5, 0.5)], message=10.0)
    row = [action.op for action in pack(lists, costs, looks_ahead=looks_ahead)[0]]
    assert row.index("I") == forwards
