"""Pictures: the grid in the terminal, the SVG, and the file in the documentation."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_pipeline.actions import action_lists
from lightning_pipeline.draw import draw_schedules, draw_svg, draw_text
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule
from lightning_pipeline.simulate import StageTime, Timeline, simulate

PICTURE = Path(__file__).parents[2] / "docs" / "schedules.svg"


def timeline_of(schedule: Schedule, ranks: int, m: int, time: StageTime) -> Timeline:
    v = schedule.default_stages_per_rank
    return simulate(action_lists(schedule, ranks, v, m), [time] * (ranks * v))


@pytest.mark.parametrize(
    ("name", "ranks", "m", "time", "expected"),
    [
        (
            "1f1b",
            2,
            3,
            StageTime(1, 1, 1),
            [
                "rank 0  0F0 0F1 ... ... 0B0---- 0F2 0B1---- ... 0B2----",
                "rank 1  ... 1F0 1B0---- 1F1 1B1---- 1F2 1B2---- ... ...",
                "bubble 25.0 %",
            ],
        ),
        (
            "zbv_zero_bubble",
            1,
            1,
            StageTime(0.1, 0.1, 0.1),
            ["rank 0  0F0 1F0 1I0 1W0 0I0 0W0", "bubble 0.0 %"],
        ),
        # A backward without weights takes half as long, and nothing is drawn for the weights.
        ("dualpipev", 1, 2, StageTime(2, 1, 0), ["rank 0  0F0---- 1F0---- 0F1---- 1B0 1F1----"]),
    ],
)
def test_grid(name: str, ranks: int, m: int, time: StageTime, expected: list[str]) -> None:
    lines = draw_text(timeline_of(get_schedule(name), ranks, m, time)).splitlines()
    assert len(lines) == ranks + 1
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=False)), lines


@pytest.mark.parametrize(
    ("width", "row"),
    [
        (300, "rank 3  ... ... ... 3F0 4F0 3F1 4F1"),
        (165, "rank 3  .. .. .. F0 F0 F1 F1"),
        (60, "rank 3  ...FFFFFFFF"),
    ],
)
def test_labels_shrink_with_the_terminal(width: int, row: str) -> None:
    time = StageTime(0.1, 0.1, 0.1)
    text = draw_text(timeline_of(get_schedule("zbv_zero_bubble"), 4, 8, time), width)
    lines = text.splitlines()
    assert lines[3].startswith(row), lines[3]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("unit", [0.07, 0.14, 0.56])
def test_sums_that_are_a_hair_off_move_no_column(unit: float) -> None:
    # With these durations some sums end just below a whole number of cells.
    texts = [
        draw_text(timeline_of(get_schedule("1f1b"), 3, 12, StageTime(t, t / 2, t / 2)), width=400)
        for t in (unit, 1.0)
    ]
    assert texts[0] == texts[1]


def test_two_digits_are_never_cut() -> None:
    time = StageTime(1 / 3, 0.4, 0.7)
    text = draw_text(timeline_of(get_schedule("1f1b"), 3, 12, time), width=1000)
    for stage in range(3):
        row = text.splitlines()[stage].replace("-", " ").split()
        assert all(cell.strip(".") in ("", cell) for cell in row), row
        for m in range(12):
            assert f"{stage}F{m}" in row and f"{stage}B{m}" in row, row


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_svg_has_a_cell_for_every_action(schedule: Schedule) -> None:
    timeline = timeline_of(schedule, 3, 6, StageTime(1, 1, 1))
    root = ElementTree.fromstring(draw_svg({"a < b": timeline}, "x & y"))
    space = "{http://www.w3.org/2000/svg}"
    texts = ["".join(node.itertext()) for node in root.iter(f"{space}text")]
    assert "x & y" in texts and any(text.startswith("a < b") for text in texts)
    assert f"{100 * timeline.bubble:.1f} %" in texts
    cells = [n for n in root.iter(f"{space}text") if n.get("class", "").startswith("cell")]
    assert len(cells) == sum(map(len, timeline.spans))
    assert {cell.text for cell in cells} == {str(m) for m in range(6)}
    width = float(root.get("width", 0))
    for rect in root.iter(f"{space}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width


def test_blocks_share_one_scale_of_time() -> None:
    timelines = {
        name: timeline_of(get_schedule("gpipe"), 2, 4, StageTime(seconds, seconds, seconds))
        for name, seconds in (("slow", 2.0), ("fast", 1.0))
    }
    root = ElementTree.fromstring(draw_svg(timelines, "title"))
    tracks = [
        float(rect.get("width", 0))
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("class") == "idle"
    ]
    # The first is in the legend; then two ranks of each block.
    assert tracks[1] == tracks[2] == pytest.approx(2 * tracks[3], abs=0.2)


def test_picture_in_the_documentation_is_what_the_code_draws() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw_schedules(), (
        "Run: python -m lightning_pipeline.draw docs/schedules.svg"
    )


def test_module_writes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["draw", str(path)])
    monkeypatch.delitem(sys.modules, "lightning_pipeline.draw")
    runpy.run_module("lightning_pipeline.draw", run_name="__main__")
    assert all(schedule.name in path.read_text(encoding="utf-8") for schedule in SCHEDULES)
