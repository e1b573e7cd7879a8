"""Which gradients are known to have arrived when a forward begins."""

from __future__ import annotations

from itertools import accumulate

import pytest

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.arrivals import Arrivals
from lightning_pipeline.schedules import SCHEDULES, get_schedule

SIZES = [(1, 4), (2, 8), (3, 6), (4, 16)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
def test_all_that_were_used_before_the_value_was_made(schedule, ranks, microbatches):
    """A forward and those before it tell of every gradient that stands before what it takes."""
    lists = action_lists(schedule, ranks, schedule.default_stages_per_rank, microbatches)
    arrivals = Arrivals(lists)
    row_of = {action: row for row in lists for action in row}
    for stage in range(1, ranks * schedule.default_stages_per_rank):
        [row] = [row for row in lists if Action(stage, "F", 0) in row]
        forwards = [a for a in row if a.stage == stage and a.op == "F"]
        told = list(accumulate((set(arrivals.before(a)) for a in forwards), set.union))
        assert sum(len(arrivals.before(a)) for a in forwards) == len(told[-1])
        expected = set()
        for action, so_far in zip(forwards, told, strict=True):
            maker = Action(stage - 1, "F", action.microbatch)
            earlier = row_of[maker][: row_of[maker].index(maker)]
            expected |= {a.microbatch for a in earlier if a.stage == stage - 1 and a.op in "BI"}
            assert so_far == expected


def test_an_example():
    lists = action_lists(get_schedule("1F1B"), 2, 1, 4)
    arrivals = Arrivals(lists)  # rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    assert [arrivals.before(Action(1, "F", m)) for m in range(4)] == [[], [], [0], [1]]
    assert arrivals.before(Action(0, "F", 3)) == []
