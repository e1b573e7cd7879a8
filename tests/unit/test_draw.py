"""Pictures: the grid in the terminal, the SVG, and the file in the documentation."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_pipeline.actions import action_lists
from lightning_pipeline.draw import Step, draw_page, draw_png, draw_svg, draw_text, draw_texts
from lightning_pipeline.draw.page import encode
from lightning_pipeline.draw.steps import COLOURS
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
    assert texts[0].splitlines()[:3] == texts[1].splitlines()[:3]


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


def test_grids_share_one_scale_of_time() -> None:
    timelines = {
        name: timeline_of(get_schedule("gpipe"), 2, 2, StageTime(seconds, seconds, seconds))
        for name, seconds in (("slow", 2.0), ("fast", 1.0))
    }
    assert draw_texts(timelines).splitlines() == [
        "slow",
        "rank 0  0F0---- 0F1---- ... ... ... ... ... ... 0B0------------ 0B1------------",
        "rank 1  ... ... 1F0---- 1F1---- 1B0------------ 1B1------------ ... ... ... ...",
        "bubble 33.3 %, step 18, peak activations 2 2",
        "",
        "fast",
        "rank 0  0F0 0F1 ... ... ... 0B0---- 0B1----",
        "rank 1  ... 1F0 1F1 1B0---- 1B1---- ... ...",
        "bubble 33.3 %, step 9, peak activations 2 2",
    ]


def test_png_has_the_colours_in_proportion() -> None:
    from matplotlib.image import imread

    timelines = {"a": timeline_of(get_schedule("gpipe"), 2, 4, StageTime(1, 1, 1))}
    pixels = 255 * imread(io.BytesIO(draw_png(timelines, "title")))[:, :, :3]
    area = {}
    for kind in "FB":
        colour = [int(COLOURS[kind][0][at : at + 2], 16) for at in (1, 3, 5)]
        area[kind] = (abs(pixels - colour).max(axis=2) < 1).sum()
    # Numbers and hairlines take some of each.
    assert area["B"] / area["F"] == pytest.approx(2, rel=0.15)


def test_png_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    timelines = {"a": timeline_of(get_schedule("gpipe"), 2, 4, StageTime(1, 1, 1))}
    with pytest.raises(ModuleNotFoundError) as caught:
        draw_png(timelines, "title")
    for part in ("format=png needs matplotlib", "lightning-pipeline[plot]", "format=svg"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ((-1, 1, 1, 0), ["forward must be", "got -1", "Set forward=1"]),
        ((1, "x", 1, 0), ["backward_input must be", "got 'x'"]),
        ((1, 1, float("inf"), 0), ["backward_weight must be", "got inf"]),
        ((1, 1, 1, True), ["message must be", "got True"]),
        ((0, 1, 1, 0), ["must take some time", "forward=0", "Set forward=1"]),
    ],
)
def test_times_that_can_not_be(values: tuple[float, ...], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Step(time=StageTime(*values[:3]), message=values[3])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "ranks", "m", "text"),
    [
        ("1f1b", 2, 3, "AABABB ABABAB"),
        ("looped_bfs", 1, 2, "AAEEF1F0B1B0"),
        ("1f1b", 4, 3, ""),
    ],
)
def test_orders_in_short(name: str, ranks: int, m: int, text: str) -> None:
    assert encode(get_schedule(name), ranks, "auto", m) == text


def test_page_stands_alone() -> None:
    page = draw_page([get_schedule("1f1b")], Step(ranks=3, microbatches=17), (2,), (4,))
    assert '"ranks":[2,3],"microbatches":[4,17]' in page
    for link in ("://", "src=", "@import", "url("):
        assert link not in page
    for mark in ("/*DATA*/", "/*STYLE*/", "/*SCRIPT*/"):
        assert mark not in page


def test_picture_in_the_documentation_is_what_the_code_draws() -> None:
    timelines = {entry.name: Step().timeline(entry) for entry in SCHEDULES}
    title = "One step of the same model: 4 ranks, 8 microbatches"
    assert PICTURE.read_text(encoding="utf-8") == draw_svg(timelines, title), (
        "Run: lightning-pipeline draw output=docs/schedules.svg"
    )
