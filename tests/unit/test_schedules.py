"""The table of schedules: names, placement, legal counts and the errors that name them."""

from __future__ import annotations

import pytest

from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule

NAMES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv_zero_bubble",
    "DualPipeV": "dualpipev",
    "ZBH1": "zb_h1",
    "ZBH2": "zb_h2",
    "VHalf": "v_half",
    "VMin": "v_min",
}
SIZES = [
    (schedule, ranks, v)
    for schedule in SCHEDULES
    for ranks in (1, 2, 3, 4, 8)
    for v in (1, 2, 3)
    if schedule.min_stages_per_rank <= v <= (schedule.max_stages_per_rank or v)
]


def test_table_holds_every_schedule_once() -> None:
    assert {schedule.name: schedule.snake for schedule in SCHEDULES} == NAMES


@pytest.mark.parametrize(("name", "snake"), NAMES.items())
@pytest.mark.parametrize("change", [str, str.lower, str.upper])
def test_names_are_found_in_any_case(name: str, snake: str, change: type[str]) -> None:
    assert get_schedule(change(name)).name == name
    assert get_schedule(change(snake)).name == name


@pytest.mark.parametrize(("paper", "name"), [("ZB-H1", "ZBH1"), ("V-Half", "VHalf")])
def test_names_are_found_as_papers_spell_them(paper: str, name: str) -> None:
    assert get_schedule(paper).name == name


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("1f1", "1F1B"),
        ("interleaved", "Interleaved1F1B"),
        ("zero_bubble_v", "ZBVZeroBubble"),
        ("V-Third", "VMin"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError) as error:
        get_schedule(wrong)
    text = str(error.value)
    assert f"got {wrong!r}" in text
    assert text.endswith(f"Set schedule={nearest!r}.")
    assert all(name in text for name in NAMES)


@pytest.mark.parametrize(("schedule", "ranks", "v"), SIZES)
def test_every_stage_has_one_rank_and_ranks_know_their_stages(
    schedule: Schedule, ranks: int, v: int
) -> None:
    held = [schedule.stages_of_rank(rank, ranks, v) for rank in range(ranks)]
    assert sorted(stage for stages in held for stage in stages) == list(range(ranks * v))
    for rank, stages in enumerate(held):
        assert list(stages) == sorted(stages)
        assert {schedule.rank_of_stage(stage, ranks, v) for stage in stages} == {rank}
    assert 0 in held[0]


@pytest.mark.parametrize(
    ("name", "v", "expected"),
    [
        ("1f1b", 1, [(0,), (1,), (2,)]),
        ("looped_bfs", 2, [(0, 3), (1, 4), (2, 5)]),
        ("dualpipev", 2, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_placement(name: str, v: int, expected: list[tuple[int, ...]]) -> None:
    assert [get_schedule(name).stages_of_rank(rank, 3, v) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gpipe", "auto", 1),
        ("1f1b", 1, 1),
        ("looped_bfs", "auto", 2),
        ("interleaved_1f1b", 1, 1),
        ("interleaved_zero_bubble", 5, 5),
        ("zbv_zero_bubble", "auto", 2),
        ("dualpipev", 2, 2),
    ],
)
def test_stages_per_rank(name: str, value: int, expected: int) -> None:
    assert get_schedule(name).resolve_stages_per_rank(value) == expected


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("1f1b", 2, ["1F1B needs exactly 1 stage on each rank", "got 2", "Set stages_per_rank=1"]),
        ("dualpipev", 1, ["needs exactly 2", "got 1", "Set stages_per_rank=2"]),
        ("zbv_zero_bubble", 3, ["needs exactly 2", "got 3", "Set stages_per_rank=2"]),
        ("looped_bfs", 0, ["stages_per_rank must be an integer of at least 1, got 0"]),
        ("looped_bfs", True, ["got True"]),
        ("looped_bfs", "two", ["got 'two'"]),
    ],
)
def test_wrong_stages_per_rank(name: str, value: int, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        get_schedule(name).resolve_stages_per_rank(value)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    ("name", "ranks", "v", "m", "nearest"),
    [
        ("gpipe", 4, 1, 1, (1,)),
        ("1f1b", 4, 1, 3, (4,)),
        ("1f1b", 4, 1, 9, (9,)),
        ("interleaved_1f1b", 2, 2, 5, (4, 6)),
        ("interleaved_zero_bubble", 4, 2, 9, (8, 10)),
        ("interleaved_zero_bubble", 4, 2, 13, (12, 15)),
        ("looped_bfs", 4, 2, 13, (13,)),
        ("zbv_zero_bubble", 4, 2, 1, (1,)),
        ("dualpipev", 4, 2, 7, (8,)),
    ],
)
def test_nearest_microbatches(
    name: str, ranks: int, v: int, m: int, nearest: tuple[int, ...]
) -> None:
    schedule = get_schedule(name)
    assert schedule.nearest_microbatches(m, ranks, v) == nearest
    assert schedule.allows_microbatches(m, ranks, v) == (nearest == (m,))
    assert all(schedule.allows_microbatches(k, ranks, v) for k in nearest)


@pytest.mark.parametrize(
    ("name", "sizes", "parts"),
    [
        (
            "1f1b",
            (4, 1, 3),
            [
                "1F1B needs at least as many microbatches as stages, got 3 for 4 stages",
                "come from pipeline_parallel_size=4 x stages_per_rank=1",
                'Set num_microbatches=4 or num_microbatches="auto"',
            ],
        ),
        ("dualpipev", (4, "auto", 7), ["got 7 for 8 stages", "Set num_microbatches=8"]),
        (
            "interleaved_1f1b",
            (2, 2, 5),
            [
                "Interleaved1F1B needs microbatches that fill whole rounds, got 5 for 2 rounds",
                "come from num_microbatches=5 // pipeline_parallel_size=2",
                "Set num_microbatches=4 or num_microbatches=6",
            ],
        ),
        ("gpipe", (4, 1, 0), ["num_microbatches must be an integer of at least 1, got 0"]),
        ("gpipe", (0, 1, 4), ["pipeline_parallel_size must be an integer of at least 1, got 0"]),
        ("gpipe", (4, 2, 4), ["GPipe needs exactly 1 stage on each rank"]),
    ],
)
def test_check_names_rule_origin_and_cure(
    name: str, sizes: tuple[int, int, int], parts: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        get_schedule(name).check(*sizes)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(("schedule", "ranks", "v"), SIZES)
def test_auto_and_one_rank_are_always_legal(schedule: Schedule, ranks: int, v: int) -> None:
    schedule.check(ranks, v, "auto")
    schedule.check(1, v, schedule.min_microbatches(1, v))


@pytest.mark.parametrize(
    ("name", "rows", "requested", "ranks", "min_rows", "expected"),
    [
        ("1f1b", 64, "auto", 4, 1, (16, 16)),
        ("1f1b", 64, 8, 4, 1, (8, 8)),
        ("1f1b", 10, "auto", 4, 1, (10, 10)),
        ("1f1b", 10, "auto", 4, 2, (5, 5)),
        ("1f1b", 3, "auto", 4, 1, (3, 4)),
        ("1f1b", 7, 8, 4, 2, (3, 4)),
        ("gpipe", 3, "auto", 4, 1, (3, 3)),
        ("gpipe", 1, "auto", 4, 8, (1, 1)),
        ("interleaved_1f1b", 9, "auto", 4, 1, (8, 8)),
        ("interleaved_1f1b", 15, "auto", 2, 1, (8, 8)),
        ("interleaved_1f1b", 5, 8, 2, 1, (4, 4)),
        ("dualpipev", 64, "auto", 4, 1, (16, 16)),
        ("dualpipev", 5, "auto", 4, 1, (5, 8)),
        ("zbv_zero_bubble", 2, "auto", 4, 1, (2, 2)),
    ],
)
def test_choose_microbatches(
    name: str,
    rows: int,
    requested: int,
    ranks: int,
    min_rows: int,
    expected: tuple[int, int],
) -> None:
    schedule = get_schedule(name)
    v = schedule.default_stages_per_rank
    assert schedule.choose_microbatches(rows, requested, ranks, v, min_rows) == expected


@pytest.mark.parametrize(("schedule", "ranks", "v"), SIZES)
def test_chosen_counts_are_legal_and_fit_the_rows(schedule: Schedule, ranks: int, v: int) -> None:
    legal = [k for k in range(1, 30) if schedule.allows_microbatches(k, ranks, v)]
    for rows in range(1, 40):
        for min_rows in (1, 2, 5):
            for requested in ("auto", *legal):
                args = (requested, ranks, v, min_rows)
                real, total = schedule.choose_microbatches(rows, *args)
                assert 1 <= real <= total
                assert real == 1 or rows // real >= min_rows
                assert schedule.allows_microbatches(total, ranks, v)
                limit = 4 * ranks if requested == "auto" else requested
                assert total <= limit or requested == "auto"
                if rows >= min_rows * limit and requested != "auto":
                    assert real == total == requested


@pytest.mark.parametrize(
    ("rows", "requested", "part"),
    [(8, 2, "needs at least as many"), (0, 4, "rows in a batch must be an integer of at least 1")],
)
def test_choose_microbatches_refuses(rows: int, requested: int, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        get_schedule("1f1b").choose_microbatches(rows, requested, ranks=4, stages_per_rank=1)
