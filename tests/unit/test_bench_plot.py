"""The picture of a results file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from benchmarks.plot import draw, groups_of


def result(name: str, *rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cores": 2, "cpu": "a <CPU>"}
    return {"name": name, "command": "x", "begun": "now", "machine": machine, "rows": list(rows)}


def ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.01, "high": median + 0.02}


LIMIT = result(
    "limit",
    {"schedule": "1F1B", "ranks": 2, "milliseconds": 10.0, "ratio": ratio(1.02)},
    {"schedule": "1F1B", "ranks": 2, "milliseconds": 10.0, "ratio": ratio(1.10)},
    {"schedule": "DualPipeV", "ranks": 2, "milliseconds": 10.0, "out_of_order": "illegal"},
    {"schedule": "1F1B", "ranks": 4, "milliseconds": 3.0, "ratio": ratio(1.30)},
)


def test_rows_of_one_name_share_a_line_and_illegal_ones_have_none() -> None:
    assert {group: [*rows] for group, rows in groups_of(LIMIT).items()} == {
        "2 ranks, 10 ms a forward": ["1F1B"],
        "4 ranks, 3 ms a forward": ["1F1B"],
    }


def test_dots_lie_where_their_ratios_are() -> None:
    root = ElementTree.fromstring(draw(LIMIT))
    space = "{http://www.w3.org/2000/svg}"
    dots = [float(dot.get("cx", "")) for dot in root.iter(f"{space}circle")]
    marks = {t.text: float(t.get("x", "")) for t in root.iter(f"{space}text")}
    one, other = marks["1"], marks["1.1"]
    assert [(x - one) / (other - one) * 0.1 + 1 for x in dots] == pytest.approx(
        [1.02, 1.10, 1.30], abs=1e-3
    )
    [line] = [x for x in root.iter(f"{space}line") if x.get("class") == "one"]
    assert float(line.get("x1", "")) == one
    assert all(0 < x < 900 for x in dots)


def test_other_results_have_no_picture() -> None:
    with pytest.raises(ValueError, match=r"limit, hand, alternatives, got the results of 'memory'"):
        draw(result("memory"))
