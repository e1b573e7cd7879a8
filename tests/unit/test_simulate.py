"""Simulated timelines against closed forms, known figures, and broken orders."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule
from lightning_pipeline.simulate import StageTime, Timeline, simulate

UNIT = StageTime(1, 1, 1)


def run(schedule: Schedule, ranks: int, v: int, m: int, message: float = 0.0) -> Timeline:
    return simulate(action_lists(schedule, ranks, v, m), [UNIT] * (ranks * v), message)


@pytest.mark.parametrize("m", [8, 16, 32])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        *(("looped_bfs", v) for v in (1, 2, 3)),
        *(("interleaved_1f1b", v) for v in (1, 2, 3)),
    ],
)
def test_bubble_is_the_closed_form(name: str, v: int, ranks: int, m: int) -> None:
    # Narayanan et al., Efficient Large-Scale Language Model Training, 2021, section 2.2.
    timeline = run(get_schedule(name), ranks, v, m)
    assert timeline.bubble == pytest.approx((ranks - 1) / (v * m + ranks - 1), abs=1e-12)
    assert timeline.makespan == 3 * (v * m + ranks - 1)


@pytest.mark.parametrize(
    ("name", "ranks", "percents"),
    [
        ("interleaved_zero_bubble", 2, {4: 4.0, 8: 2.0, 16: 1.0}),
        ("interleaved_zero_bubble", 4, {4: 11.1, 8: 5.9, 16: 3.0}),
        ("interleaved_zero_bubble", 8, {8: 12.7, 16: 6.8, 32: 3.5}),
        ("zbv_zero_bubble", 2, {4: 4.0, 8: 2.0, 16: 1.0}),
        ("zbv_zero_bubble", 4, {4: 20.0, 8: 5.9, 16: 3.0}),
        ("zbv_zero_bubble", 8, {8: 22.6, 16: 6.8, 32: 3.5}),
        ("dualpipev", 2, {4: 4.0, 8: 2.0, 16: 1.0}),
        ("dualpipev", 4, {8: 5.9, 16: 3.0}),
        ("dualpipev", 8, {16: 6.8, 32: 3.5}),
    ],
)
def test_bubble_of_split_backwards(name: str, ranks: int, percents: dict[int, float]) -> None:
    found = {m: round(100 * run(get_schedule(name), ranks, 2, m).bubble, 1) for m in percents}
    assert found == percents


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_legal_order_runs_to_its_end(schedule: Schedule) -> None:
    for ranks in range(1, 7):
        for v in {schedule.default_stages_per_rank, schedule.max_stages_per_rank or 3}:
            for m in range(1, 19):
                if schedule.allows_microbatches(m, ranks, v):
                    timeline = run(schedule, ranks, v, m)
                    assert sum(map(len, timeline.spans)) >= 2 * ranks * v * m
                    assert 0.0 <= timeline.bubble < 1.0


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_nothing_starts_before_what_it_needs(schedule: Schedule) -> None:
    ranks, v, message = 4, schedule.default_stages_per_rank, 0.25
    timeline = run(schedule, ranks, v, 8, message)
    end = {span.action: span.end for row in timeline.spans for span in row}
    last = ranks * v - 1
    for row in timeline.spans:
        assert all(a.end <= b.start for a, b in pairwise(row))
        for (stage, op, m), start, _ in row:
            if op == "F" and stage > 0:
                sources = [(stage - 1, ("F",))]
            elif op in "BI":
                sources = [(stage, ("F",)), *([(stage + 1, ("B", "I"))] if stage < last else [])]
            else:
                sources = [(stage, ("I",))] if op == "W" else []
            for source, ops in sources:
                (done,) = (end[a] for kind in ops if (a := Action(source, kind, m)) in end)
                same = schedule.rank_of_stage(source, ranks, v) == schedule.rank_of_stage(
                    stage, ranks, v
                )
                assert start >= done + (0 if same else message)


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("gpipe", (8, 8, 8, 8)),
        ("1f1b", (4, 3, 2, 1)),
        ("interleaved_1f1b", (11, 9, 7, 5)),
        ("looped_bfs", (16, 16, 16, 16)),
        ("interleaved_zero_bubble", (8, 8, 8, 8)),
        ("zbv_zero_bubble", (8, 8, 8, 8)),
        ("dualpipev", (9, 9, 9, 9)),
    ],
)
def test_peak_activations(name: str, peaks: tuple[int, ...]) -> None:
    schedule = get_schedule(name)
    timeline = run(schedule, 4, schedule.default_stages_per_rank, 8)
    assert timeline.peak_activations == peaks
    by_stage = timeline.peak_activations_of_stage
    assert list(by_stage) == list(range(4 * schedule.default_stages_per_rank))
    assert max(by_stage.values()) <= 8


def test_messages_delay_but_do_not_occupy() -> None:
    # Forward there, backward back: two messages, and nothing to do meanwhile.
    assert run(get_schedule("gpipe"), 2, 1, 1, message=0.5).makespan == 6 + 2 * 0.5
    # Both stages of a rank at the bottom of the V exchange nothing.
    assert run(get_schedule("zbv_zero_bubble"), 1, 2, 1, message=0.5).makespan == 6


def test_unequal_stages_wait_for_the_slowest() -> None:
    times = [StageTime(1, 1, 1), StageTime(2, 2, 2)]
    timeline = simulate(action_lists(get_schedule("1f1b"), 2, 1, 10), times)
    assert timeline.makespan == 1 + 10 * 6 + 2
    assert timeline.bubble == pytest.approx(1 - 90 / (2 * 63))


@pytest.mark.parametrize(
    ("lists", "parts"),
    [
        (
            [["0F0", "0B0"], ["1B0", "1F0"]],
            [
                "after 1 of 4 actions",
                "rank 0 stands at 0B0 and waits for 1B0 or 1I0",
                "rank 1 stands at 1B0 and waits for 1F0",
                "action lists of the 2 ranks",
            ],
        ),
        ([["0F0"], ["1F1"]], ["rank 1 stands at 1F1 and waits for 0F1"]),
        ([["0F0", "0B0"], ["1F0", "1W0"]], ["stands at 1W0 and waits for 1B0 or 1I0"]),
    ],
)
def test_deadlocks_are_named(lists: list[list[str]], parts: list[str]) -> None:
    actions = [[Action(int(a[0]), a[1], int(a[2])) for a in row] for row in lists]
    with pytest.raises(ValueError) as error:
        simulate(actions, [UNIT, UNIT])
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_large_pipelines_take_less_than_a_second(schedule: Schedule) -> None:
    v = schedule.default_stages_per_rank
    lists = action_lists(schedule, 16, v, 64)
    start = time.process_time()
    timeline = simulate(lists, [UNIT] * (16 * v))
    assert time.process_time() - start < 1.0
    assert timeline.bubble < 0.2


def test_no_actions_take_no_time() -> None:
    timeline = simulate([[], []], [UNIT, UNIT])
    assert (timeline.makespan, timeline.bubble, timeline.peak_activations) == (0.0, 0.0, (0, 0))
