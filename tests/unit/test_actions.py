"""Action lists: complete, in the right place, and legal exactly where torch says so."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule

SIZES = [
    (schedule, ranks, v)
    for schedule in SCHEDULES
    for ranks in (1, 2, 3, 4, 8)
    for v in (1, 2, 3)
    if schedule.min_stages_per_rank <= v <= (schedule.max_stages_per_rank or v)
]


@pytest.mark.parametrize(("schedule", "ranks", "v"), SIZES)
def test_each_stage_runs_each_microbatch_once_on_its_rank(
    schedule: Schedule, ranks: int, v: int
) -> None:
    for m in range(1, 21):
        if not schedule.allows_microbatches(m, ranks, v):
            continue
        lists = action_lists(schedule, ranks, v, m)
        assert len(lists) == ranks
        counts = Counter(action for actions in lists for action in actions)
        assert set(counts.values()) == {1}
        for stage in range(ranks * v):
            for k in range(m):
                assert counts[Action(stage, "F", k)] == 1
                whole, inputs, weights = (counts[Action(stage, op, k)] for op in "BIW")
                assert whole + inputs == 1 and inputs == weights
        for rank, actions in enumerate(lists):
            held = schedule.stages_of_rank(rank, ranks, v)
            assert {action.stage for action in actions} == set(held)
        split = any(action.op in "IW" for action in counts)
        # Few microbatches on one rank may leave DualPipeV nothing to split.
        assert split <= schedule.splits_backward
        assert split or not schedule.splits_backward or ranks == 1


def _torch_allows(schedule: Schedule, ranks: int, v: int, m: int) -> bool:
    size = {"group_rank": 0, "group_size": ranks, "num_stages": ranks * v, "submod": None}
    stages = [SimpleNamespace(**size) for _ in range(v)]
    kind = torch_schedules.get_schedule_class(schedule.name)
    try:
        kind(stages[0] if schedule.is_single else stages, m)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("schedule", "ranks", "v"), [size for size in SIZES if size[0].in_torch])
def test_legal_counts_are_those_of_torch(schedule: Schedule, ranks: int, v: int) -> None:
    for m in range(1, 25):
        ours = schedule.allows_microbatches(m, ranks, v)
        assert ours == _torch_allows(schedule, ranks, v, m), m


@pytest.mark.parametrize(
    ("name", "ranks", "m", "expected"),
    [
        ("gpipe", 2, 2, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        (
            "1f1b",
            3,
            4,
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        ("interleaved_1f1b", 1, 1, ["0F0 1F0 1B0 0B0"]),
        ("looped_bfs", 1, 2, ["0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"]),
        ("zbv_zero_bubble", 1, 1, ["0F0 1F0 1I0 1W0 0I0 0W0"]),
    ],
)
def test_orders(name: str, ranks: int, m: int, expected: list[str]) -> None:
    schedule = get_schedule(name)
    lists = action_lists(schedule, ranks, schedule.default_stages_per_rank, m)
    assert [" ".join(map(str, actions)) for actions in lists] == expected


def test_overlapped_pairs_are_flattened_forward_first() -> None:
    lists = action_lists(get_schedule("dualpipev"), ranks=2, stages_per_rank=2, microbatches=5)
    assert " ".join(map(str, lists[0])) == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 "
        "0I3 0W3 0I4 0W4"
    )


def test_illegal_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="Set num_microbatches=8"):
        action_lists(get_schedule("dualpipev"), ranks=4, stages_per_rank=2, microbatches=4)
