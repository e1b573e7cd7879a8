"""Schedules in CSV files: what is read, what is refused and how it is named."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from lightning_pipeline.actions import action_lists
from lightning_pipeline.layout import resolve_layout
from lightning_pipeline.order_files import read_schedule, write_order
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule

ONE_F_ONE_B = "0F0,0F1,,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,,\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.csv"


def test_a_file_is_a_schedule(path: Path) -> None:
    path.write_text(ONE_F_ONE_B)
    schedule = get_schedule(str(path))
    assert (schedule.name, schedule.sizes) == (str(path), (2, 3))
    assert (schedule.is_single, schedule.splits_backward, schedule.placement) == (
        True,
        False,
        "loop",
    )
    assert action_lists(schedule, 2, 1, 3) == action_lists(get_schedule("1F1B"), 2, 1, 3)
    assert pickle.loads(pickle.dumps(schedule)).order(2, 1, 3) == action_lists(schedule, 2, 1, 3)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_written_is_read(schedule: Schedule, ranks: int, path: Path) -> None:
    v = schedule.default_stages_per_rank
    lists = action_lists(schedule, ranks, v, 8)
    write_order(lists, path)
    found = read_schedule(path)
    assert found.order is not None and found.order(ranks, v, 8) == lists
    assert found.resolve_stages_per_rank("auto") == v
    for rank in range(ranks):
        # On one rank a loop and a V are the same.
        assert found.stages_of_rank(rank, ranks, v) == schedule.stages_of_rank(rank, ranks, v)
    found.check(ranks, v, 8)


def test_three_stages_on_a_rank(path: Path) -> None:
    lists = action_lists(get_schedule("Interleaved1F1B"), 2, 3, 4)
    write_order(lists, path)
    assert read_schedule(path).resolve_stages_per_rank("auto") == 3


def test_files_of_torch_are_read(path: Path) -> None:
    from types import SimpleNamespace

    size = {"group_rank": 0, "group_size": 2, "num_stages": 4, "submod": None}
    torch_schedule = ScheduleDualPipeV([SimpleNamespace(**size) for _ in range(2)], 6)
    torch_schedule._dump_csv(str(path), "compute_only")
    assert "OVERLAP_F_B" in path.read_text()
    lists = action_lists(read_schedule(path), 2, 2, 6)
    assert lists == action_lists(get_schedule("DualPipeV"), 2, 2, 6)


def test_blank_rows_at_the_end_and_spaces_are_nothing(path: Path) -> None:
    path.write_text("\N{BOM}" + ONE_F_ONE_B.replace(",", " , ") + "\n,,\n")
    assert read_schedule(path).sizes == (2, 3)


REFUSED = {
    "unknown": (
        "0F0,0B0\n1F0,1X0\n",
        ["operation (F, B, I or W)", "got '1X0' in row 2, column 2", "Write it as 0F3"],
    ),
    "message": ("0F0,0SEND_F0,0B0\n", ["got '0SEND_F0' in row 1, column 2"]),
    "part of a pair": ("(0F0;0Q0)OVERLAP_F_B\n", ["got '0Q0' in row 1, column 1"]),
    "twice": (
        "0F0,0B0,0F0\n",
        ["every action once, got 0F0 in row 1, column 1 and in row 1, column 3"],
    ),
    "on two ranks": (
        "0F0,0B0,1F1,0F1,0B1\n1F0,1B0,1B1\n",
        ["each stage on one rank", "1F0 in row 2, column 1, and stage 1 in row 1", "to row 1"],
    ),
    "no forward": (
        "0F0,0B0,0B1\n",
        ["got 0B1 in row 1, column 3 for microbatch 1 of stage 0", "Add 0F1 to row 1"],
    ),
    "no backward": ("0F0\n", ["got 0F0 in row 1, column 1", "Add 0B0 to row 1"]),
    "no weights": (
        "0F0,0B0\n1F0,1I0\n",
        ["1F0 in row 2, column 1, 1I0 in row 2, column 2", "Add 1W0 to row 2"],
    ),
    "no microbatch": (
        "0F0,0F2,0B0,0B2\n",
        ["got nothing for microbatch 1 of stage 0", "0F1 and 0B1"],
    ),
    "whole and parts": (
        "0F0,0B0,0I0,0W0\n",
        ["0B0 in row 1, column 2, 0I0 in row 1, column 3", "Remove 0B0, or the parts of it"],
    ),
    "own order": (
        "0B0,0F0\n",
        ["0B0 in row 1, column 1 needs 0F0, which is in row 1, column 2", "Move one of them"],
    ),
    "weights first": (
        "0F0,0W0,,0I0\n",
        ["0W0 in row 1, column 2 needs 0I0, which is in row 1, column 4"],
    ),
    "circle": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        [
            "0B0 in row 1, column 2 needs 1B0, which is in row 2, column 3",
            "1F1 in row 2, column 2 needs 0F1, which is in row 1, column 3",
        ],
    ),
    "uneven": (
        "0F0,1F0,1B0,0B0\n2F0,2B0\n",
        ["2 stages on each of its 2 ranks", "1F0 in row 1, column 2", "Write stage 1 into row 2"],
    ),
    "empty rank": ("0F0,0B0\n\n1F0,1B0\n", ["1F0 in row 3, column 1", "Write stage 1 into row 2"]),
    "missing stage": (
        "0F0,0B0\n2F0,2B0\n",
        ["2 stages on each", "got no action of stage 1", "into row 2"],
    ),
    "nothing": (",\n", ["at least one action, got none"]),
}


REFUSED |= {
    "forwards in another order": (
        "0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n",
        ["0F1 in row 1, column 1 before 0F0 in row 1, column 2", "Swap them"],
    ),
    "a stage far away": ("0F0,0B0\n10000000000F0,1B0\n", ["10000000000F0 in row 2, column 1"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_action_its_row_and_column(case: str, path: Path) -> None:
    text, parts = REFUSED[case]
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_schedule(path)
    assert all(part in str(error.value) for part in [*parts, str(path)]), error.value


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"readable, got .*No such file.*none\.csv.*Set it to"):
        get_schedule(str(tmp_path / "none.csv"))


def test_other_sizes_are_refused(path: Path) -> None:
    path.write_text(ONE_F_ONE_B)
    schedule = read_schedule(path)
    schedule.check(2, "auto", "auto")
    for sizes, parts in (
        ((4, 1, 3), ["each of its 2 rows, got 4 ranks", "Set pipeline_parallel_size=2"]),
        ((2, 2, 3), ["needs exactly 1 stage on each rank", "got 2"]),
        ((2, 1, 4), ["the 3 microbatches of its lists, got 4", "Set num_microbatches=3 or"]),
        ((2, 1, 2), ["the 3 microbatches of its lists, got 2"]),
    ):
        with pytest.raises(ValueError) as error:
            schedule.check(*sizes)
        assert all(part in str(error.value) for part in parts), error.value
    assert resolve_layout(4, stages=2, schedule=str(path)).replicas == 2
    with pytest.raises(
        ValueError, match="Set pipeline_parallel_size=2, or stages=2 on the command"
    ):
        resolve_layout(4, stages=4, schedule=str(path))


@pytest.mark.parametrize(
    ("rows", "expected"), [(64, (3, 3)), (3, (3, 3)), (2, (2, 3)), (1, (1, 3))]
)
def test_batches_fill_the_microbatches_of_the_file(
    rows: int, expected: tuple[int, int], path: Path
) -> None:
    path.write_text(ONE_F_ONE_B)
    schedule = read_schedule(path)
    for requested in ("auto", 3):
        assert schedule.choose_microbatches(rows, requested, 2, 1) == expected
