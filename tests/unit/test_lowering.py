"""Messages in the lists of the ranks."""

from __future__ import annotations

import pytest

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.lowering import Transfer, lower, receive_early
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
    first, second = map(words, lower(lists, 2))
    assert first == "0F0 >F0 0F1 >F1 <B0 0B0 <B1 0B1"
    assert second == "<F0 <F1 1F0 1B0 >B0 1F1 1B1 >B1"


def words(steps):
    return " ".join(
        str(s) if isinstance(s, Action) else f"{'>' if s.sends else '<'}{s.kind}{s.microbatch}"
        for s in steps
    )


def test_receiving_early_moves_messages_in_front_of_the_action_before():
    lists = action_lists(get_schedule("1F1B"), 2, 1, 2)
    first, second = map(receive_early, lower(lists, 2))
    assert words(first) == "0F0 >F0 <B0 0F1 >F1 <B1 0B0 0B1"
    assert words(second) == "<F0 <F1 1F0 1B0 >B0 1F1 1B1 >B1"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
def test_receiving_early_keeps_the_order_of_all_else_and_of_receives(schedule):
    for row in lowered(schedule, 4, 8)[1]:
        early = receive_early(row)

        def receives(steps):
            return [s for s in steps if isinstance(s, Transfer) and not s.sends]

        assert receives(early) == receives(row)
        kept = [s for s in early if s not in set(receives(row))]
        assert kept == [s for s in row if s not in set(receives(row))]
        assert all(early.index(s) <= row.index(s) for s in receives(row))
