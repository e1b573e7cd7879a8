"""Timelines of random legal orders with random times, and parts of the model against arithmetic."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import Link, StageBytes, StageTime, Timeline, simulate

# Eighths, whose sums are exact in any order.
SECONDS = st.integers(0, 32).map(lambda eighths: eighths / 8)
SIZES = st.integers(0, 5)


def sources(action: Action, backward: dict[tuple[int, int], str]) -> list[Action]:
    """What must have ended before an action begins, given each backward's ``B`` or ``I``."""
    stage, op, m = action
    if op == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if op == "W":
        return [Action(stage, "I", m)]
    behind = backward.get((stage + 1, m))
    return [Action(stage, "F", m), *([Action(stage + 1, behind, m)] if behind else [])]


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[list[Action]], int]:
    """Action lists that a random run has left behind: any stage on any rank, split or whole."""
    num_stages, ranks, microbatches = (draw(st.integers(1, n)) for n in (5, 3, 4))
    place = [draw(st.integers(0, ranks - 1)) for _ in range(num_stages)]
    pairs = [(stage, m) for stage in range(num_stages) for m in range(microbatches)]
    backward = {pair: draw(st.sampled_from("BI")) for pair in pairs}
    left = [
        Action(s, op, m)
        for (s, m), kind in backward.items()
        for op in ("F", kind, *("W" if kind == "I" else ""))
    ]
    random, lists, done = draw(st.randoms(use_true_random=False)), [[] for _ in range(ranks)], set()
    while left:
        chosen = random.choice([a for a in left if done.issuperset(sources(a, backward))])
        left.remove(chosen)
        done.add(chosen)
        lists[place[chosen.stage]].append(chosen)
    return lists, num_stages


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[Action]], list[StageTime], Link, list[float]]:
    lists, n = draw(orders())
    times = [StageTime(*(draw(SECONDS) for _ in range(4))) for _ in range(n)]
    link = Link(
        draw(SECONDS), draw(st.sampled_from([0.5, 1.0, 2.0])), [draw(SIZES) for _ in range(n)]
    )
    return lists, times, link, [draw(SECONDS) for _ in range(n)]


@given(cases())
@settings(max_examples=200)
def test_every_timeline_is_legal(case) -> None:
    lists, times, link, reductions = case
    timeline = simulate(lists, times, link, reductions)
    end = {span.action: span.end for row in timeline.spans for span in row}
    rank_of = {a.stage: rank for rank, row in enumerate(lists) for a in row}
    backward = {(a.stage, a.microbatch): a.op for a in end if a.op in "BI"}
    assert [[span.action for span in row] for row in timeline.spans] == lists
    for rank, row in enumerate(timeline.spans):
        assert all(a.end <= b.start for a, b in pairwise(row))
        for action, start, stop in row:
            assert stop - start == times[action.stage].of(action.op)
            for source in sources(action, backward):
                way = 0
                if rank_of[source.stage] != rank:
                    size = link.bytes[min(source.stage, action.stage)]
                    way = link.latency + size / link.bandwidth
                assert start >= end[source] + way
    assert timeline.makespan == max(
        end
        for rows in (timeline.spans, timeline.reductions)
        for row in rows
        for *_, end in row[-1:]
    )
    for row, own, idle in zip(timeline.spans, timeline.reductions, timeline.idle, strict=True):
        busy = sum(times[a.stage].of(a.op) for a, *_ in row)
        assert idle == timeline.makespan - busy
        assert sorted(r.stage for r in own) == sorted({a.stage for a, *_ in row})
        assert all(a.end <= b.start for a, b in pairwise(own))
        for stage, start, stop in own:
            assert stop - start == reductions[stage]
            assert start >= max(end[a] for a in end if a.stage == stage)


@given(cases())
@settings(max_examples=100)
def test_nothing_waits_without_a_cause(case) -> None:
    """Each start is the end of the action before it, or the moment that something arrives."""
    lists, times, link, reductions = case
    timeline = simulate(lists, times, link, reductions)
    arrivals = arrival_times(timeline, times, link)
    for row in timeline.spans:
        before = 0
        for action, start, end in row:
            assert start == max([before, *arrivals[action]])
            before = end


def arrival_times(timeline: Timeline, times: list[StageTime], link: Link) -> dict[Action, list]:
    """For each action, when its messages come, by the sends of each pair of ranks in order."""
    done = {span.action: span.end for row in timeline.spans for span in row}
    rank_of = {a.stage: rank for rank, row in enumerate(timeline.spans) for a, *_ in row}
    arrivals: dict[Action, list] = {action: [] for action in done}
    messages = []
    for rank, row in enumerate(timeline.spans):
        for order, (action, _, end) in enumerate(row):
            stage, op, m = action
            to = stage + 1 if op == "F" else stage - 1
            if op == "W" or not 0 <= to < len(times):
                continue
            [user] = [
                a for kind in ("F" if op == "F" else "BI") if (a := Action(to, kind, m)) in done
            ]
            if rank_of[to] == rank:
                arrivals[user].append(end)
            else:
                messages.append(((rank, rank_of[to]), order, end, min(stage, to), user))
    free: dict[tuple[int, int], float] = {}
    for way, _, end, boundary, user in sorted(messages, key=lambda message: message[:2]):
        free[way] = max(end, free.get(way, 0)) + link.bytes[boundary] / link.bandwidth
        arrivals[user].append(free[way] + link.latency)
    return arrivals


@given(orders(), st.data())
def test_peak_bytes_are_the_most_that_is_alive(order, data) -> None:
    """Against what is alive while each action runs and behind it, from the list alone."""
    lists, n = order
    stages = [StageBytes(*(data.draw(SIZES) for _ in range(3))) for _ in range(n)]
    peaks = simulate(lists, [StageTime(1, 1, 1)] * n).peak_bytes(stages)
    for row, peak in zip(lists, peaks, strict=True):
        alive = [0]
        for at, action in enumerate(row):
            before, behind = Counter(row[:at]), Counter(row[: at + 1])
            held = [_alive(counts, stages) for counts in (before, behind)]
            own = stages[action.stage]
            extra = {"F": own.activations, "W": 0}.get(action.op, own.recomputed)
            alive += [held[0] + extra, held[1]]
        assert peak == max(alive)


def _alive(counts: Counter, stages: list[StageBytes]) -> int:
    return sum(
        number * {"F": own.activations, "W": -own.deferred}.get(op, 0)
        - number * (op in "BI") * own.activations
        + number * (op == "I") * own.deferred
        for (stage, op, _), number in counts.items()
        for own in [stages[stage]]
    )


def chain(*names: str) -> list[list[Action]]:
    return [[Action(int(a[0]), a[1], int(a[2:])) for a in row.split()] for row in names]


def test_messages_of_one_direction_pass_one_after_the_other() -> None:
    lists = chain("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    timeline = simulate(lists, [StageTime(1, 1, 0)] * 2, Link(latency=1, bandwidth=2, bytes=[6]))
    starts = [[span.start for span in row] for row in timeline.spans]
    # 0F0 ends at 1 and 0F1 at 2: the wire is busy from 1 to 4 and from 4 to 7.
    # 1B0 ends at 10 and 1B1 at 11: busy from 10 to 13 and from 13 to 16, the other direction.
    assert starts == [[0, 1, 14, 17], [5, 8, 9, 10]]


def test_reductions_run_beside_the_computation_and_one_after_the_other() -> None:
    lists = chain("0F0 1F0 1I0 0I0 1W0 0W0")
    timeline = simulate(lists, [StageTime(1, 1, 1)] * 2, reductions=[2.0, 3.0])
    assert timeline.reductions == (((1, 5.0, 8.0), (0, 8.0, 10.0)),)
    assert (timeline.makespan, timeline.idle) == (10.0, (4.0,))
    assert timeline.bubble == pytest.approx(0.4)


def test_recomputation_runs_before_the_backward() -> None:
    lists = chain("0F0 0I0 0W0", "1F0 1B0")
    timeline = simulate(lists, [StageTime(1, 2, 3, 1), StageTime(1, 2, 3, 0.5)])
    ends = {str(span.action): span.end for row in timeline.spans for span in row}
    assert ends == {"0F0": 1, "1F0": 2, "1B0": 2 + 5.5, "0I0": 7.5 + 3, "0W0": 10.5 + 3}
    stages = [StageBytes(10, 4, 5), StageBytes(7, 0, 20)]
    assert timeline.peak_bytes(stages) == (15, 27)


def test_large_pipelines_take_less_than_two_seconds() -> None:
    whole = action_lists(get_schedule("1f1b"), 64, 1, 512)
    split = {"F": "F", "B": "IW"}
    lists = [[Action(s, op, m) for s, kind, m in row for op in split[kind]] for row in whole]
    link = Link(0.125, 8.0, [1.0] * 63)
    start = time.process_time()
    timeline = simulate(lists, [StageTime(1, 1, 1)] * 64, link, [1.0] * 64)
    assert time.process_time() - start < 2.0
    assert sum(map(len, timeline.spans)) == 64 * 512 * 3
