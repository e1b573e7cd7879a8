"""The arithmetic of devices, stages and schedules, and what is said when it does not work out."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipeline.layout import Layout, resolve_layout


@pytest.mark.parametrize(
    ("devices", "stages", "schedule", "per_rank", "expected"),
    [
        (2, "auto", "1f1b", "auto", Layout(2, 1, 1)),
        (4, 2, "gpipe", "auto", Layout(2, 2, 1)),
        (2, 4, "interleaved_zero_bubble", "auto", Layout(2, 1, 2)),
        (8, 4, "InterleavedZeroBubble", "auto", Layout(2, 4, 2)),
        (2, 8, "looped_bfs", 4, Layout(2, 1, 4)),
        (4, "auto", "dualpipev", "auto", Layout(4, 1, 2)),
        (6, 6, "zbv_zero_bubble", 2, Layout(3, 2, 2)),
    ],
)
def test_layouts(devices: int, stages: int, schedule: str, per_rank: int, expected: Layout) -> None:
    assert resolve_layout(devices, stages, schedule, stages_per_rank=per_rank) == expected
    ranks, replicas, depth = expected
    assert ranks * replicas == devices
    assert stages in ("auto", ranks * depth)


REFUSED = [
    # devices, stages, schedule, microbatches, rule, cure
    (1, "auto", "1f1b", "auto", "at least 2 devices, got 1", "devices=2, or strategy=single"),
    (2, 3, "1f1b", "auto", "3 ranks, which do not divide 2 devices", "stages=2 or devices=3"),
    (3, 2, "gpipe", "auto", "2 ranks, which do not divide 3", "stages=3 or devices=2 or devices=4"),
    (4, 3, "1f1b", "auto", "3 ranks, which do not divide 4", "stages=2 or stages=4 or devices=3"),
    (2, 5, "interleaved_1f1b", "auto", "5 stages are not a multiple of 2", "Set stages=4."),
    (4, 7, "dualpipev", "auto", "7 stages are not a multiple of 2", "stages=4 or stages=8"),
    (2, 2, "zbv_zero_bubble", "auto", "2 stages fill one rank", "Set stages=4."),
    (2, 8, "interleaved_1f1b", "auto", "4 ranks", "devices=4 or schedule.stages_per_rank=4"),
    (2, 2, "interleaved_1f1b", "auto", "fill one rank", "or schedule.stages_per_rank=1"),
    (2, 4, "dualpipev", 3, "needs 4 microbatches, the nearest to the 3", "Set microbatches=4 or"),
    (3, 6, "interleaved_1f1b", 7, "needs 6 or 8 microbatches", "microbatches=6 or microbatches=8"),
    (2, 0, "1f1b", "auto", "stages must be an integer of at least 1, got 0", "Set it to 1"),
    (2, 2, "1f1b", 0, "microbatches must be an integer of at least 1, got 0", "Set it to 1"),
]


@pytest.mark.parametrize(("devices", "stages", "schedule", "microbatches", "rule", "cure"), REFUSED)
def test_refusals(
    devices: int, stages: int, schedule: str, microbatches: int, rule: str, cure: str
) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_layout(devices, stages, schedule, microbatches)
    assert rule in str(caught.value)
    assert cure in str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 6, 7, 8, 9, 12, 16])
def test_every_cure_works(devices: int, stages: int, schedule: str) -> None:
    try:
        resolve_layout(devices, stages, schedule)
    except ValueError as error:
        cures = str(error).rpartition("Set ")[2].rstrip(".").split(" or ")
    else:
        return
    for cure in cures:
        name, value = cure.split("=")
        arguments = {"devices": devices, "stages": stages, "schedule": schedule}
        arguments[name.removeprefix("schedule.")] = int(value)
        resolve_layout(**arguments)  # type: ignore[arg-type]


def test_a_file_has_its_own_ranks(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert resolve_layout(4, "auto", str(path)) == Layout(2, 2, 1)
    with pytest.raises(ValueError, match=r"do not divide 3 devices.*Set devices=2 or devices=4\."):
        resolve_layout(3, "auto", str(path))


@pytest.mark.parametrize(
    ("stages", "example"),
    [(4, "schedule=interleaved_1f1b stages=4"), (2, "schedule=1f1b stages=2"), (3, None)],
)
def test_an_open_schedule_names_one_that_fits(stages: int, example: str | None) -> None:
    with pytest.raises(ValueError) as error:
        resolve_layout(2, stages, "auto")
    assert str(error.value).endswith(f"e.g. {example}." if example else "or name the schedule.")
    if example is not None:
        resolve_layout(2, stages, example.split()[0].partition("=")[2])
