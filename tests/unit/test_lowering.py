"""Messages in the lists of the ranks."""

from __future__ import annotations

import pytest

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.lowering import Transfer, lower
from lightning_pipeline.schedules import SCHEDULES, get_schedule

SIZES = [(1, 4), (2, 8), (3, 6), (4, 8), (8, 16)]


def lowered(schedule, ranks, microbatches):
    per_rank = schedule.default_stages_per_rank
    lists = action_lists(schedule, ranks, per_rank, microbatches)
    return lists, lower(lists, ranks * per_rank)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
class TestEverySchedule:
    def test_the_actions_stay_in_order(self, schedule, ranks, microbatches):
        lists, steps = lowered(schedule, ranks, microbatches)
        for actions, row in zip(lists, steps, strict=True):
            assert [step for step in row if isinstance(step, Action)] == list(actions)

    def test_two_ranks_list_their_messages_in_one_order(self, schedule, ranks, microbatches):
        _, steps = lowered(schedule, ranks, microbatches)

        def between(rank, peer):
            row = [s for s in steps[rank] if isinstance(s, Transfer) and s.peer == peer]
            return [(s.kind, s.stage, s.microbatch, s.sends == (rank < peer)) for s in row]

        for first in range(ranks):
            for second in range(first):
                assert between(first, second) == between(second, first)

    def test_nothing_is_used_before_it_can_have_come(self, schedule, ranks, microbatches):
        """Runs the lists on ranks that stop at each message until its other end has come to it."""
        _, steps = lowered(schedule, ranks, microbatches)
        at, made, got = [0] * ranks, set(), set()
        last = ranks * schedule.default_stages_per_rank - 1

        def ready(step):
            stage, op, m = step
            needs = []
            if op == "F" and stage:
                needs = [("F", stage, m)]
            if op in "BI" and stage < last:
                needs = [("B", stage, m)]
            return all(need in made or need in got for need in needs)

        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(steps):
                if at[rank] == len(row):
                    continue
                step = row[at[rank]]
                if isinstance(step, Action):
                    assert ready(step), f"rank {rank} cannot run {step}"
                    if step.op != "W":
                        to = step.stage + (1 if step.op == "F" else -1)
                        made.add(("F" if step.op == "F" else "B", to, step.microbatch))
                else:
                    other = steps[step.peer][at[step.peer]]
                    if other != step._replace(sends=not step.sends, peer=rank):
                        continue
                    got.add(step[1:4])
                    at[step.peer] += 1
                at[rank] += 1
                moved = True
        assert at == [len(row) for row in steps], "ranks wait in a circle"


def test_an_example():
    lists = action_lists(get_schedule("1F1B"), 2, 1, 2)
    words = [
        [
            str(s) if isinstance(s, Action) else f"{'>' if s.sends else '<'}{s.kind}{s.microbatch}"
            for s in row
        ]
        for row in lower(lists, 2)
    ]
    assert " ".join(words[0]) == "0F0 >F0 0F1 >F1 <B0 0B0 <B1 0B1"
    assert " ".join(words[1]) == "<F0 <F1 1F0 1B0 >B0 1F1 1B1 >B1"
