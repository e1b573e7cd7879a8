"""Draws the ratios of one results file as dots with quartiles.

    python -m benchmarks.plot outputs/DAY/TIME/results.json docs/speed.svg

A row is what is compared, a dot its median ratio, the line through it the quartiles. *limit*: step
over critical path, one dot for each number of microbatches, more of them darker. *hand*: step over
that of 1F1B by hand. *alternatives*: how many times as fast as DDP.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _MARGIN, _LABEL, _ROW, _HEAD, _GROUP, _FOOT = 900, 20, 210, 19, 64, 30, 40
_STYLE = """\
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
.card { fill: #ffffff; stroke: #d5dbe3; } .grid { stroke: #e2e7ee; } .one { stroke: #1b2430; }
.title { font-size: 17px; font-weight: 600; fill: #1b2430; }
.name { font-size: 13px; font-weight: 600; fill: #1b2430; }
.label { font-size: 12px; fill: #1b2430; } .note { font-size: 11px; fill: #5d6876; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.dot0 { fill: #8fb4e3; stroke: #8fb4e3; } .dot1 { fill: #5b8dc9; stroke: #5b8dc9; }
.dot2 { fill: #2f66ad; stroke: #2f66ad; }
@media (prefers-color-scheme: dark) {
.card { fill: #151b23; stroke: #313944; } .grid { stroke: #262e39; } .one { stroke: #e8edf3; }
.title, .name, .label { fill: #e8edf3; } .note { fill: #98a4b3; }
}"""


@dataclass(frozen=True)
class Kind:
    """How the rows of a benchmark are drawn.

    Attributes:
        title: Heading, and what the ratio is.
        ratio: Key of the ratio.
        group: Heading of the group that a row is in, to be filled in from the row.
        label: Key of the row's name.
    """

    title: str
    ratio: str
    group: str
    label: str


KINDS = {
    "limit": Kind(
        "Step time over the critical path of the schedule",
        "ratio",
        "{ranks} ranks, {milliseconds:g} ms a forward",
        "schedule",
    ),
    "hand": Kind(
        "Step time over that of 1F1B by hand on torch's pipelining", "to_base", "{model}", "way"
    ),
    "alternatives": Kind("Times as fast as DDP", "to_ddp", "{case}: {model}", "way"),
}

Groups = dict[str, dict[str, list[dict[str, float]]]]


def groups_of(found: dict[str, Any]) -> Groups:
    """Ratios by group and label, in the order of the rows; rows without a ratio are left out.

    Raises:
        ValueError: If the file is of a benchmark that has no picture.
    """
    name = found["name"]
    if name not in KINDS:
        raise ValueError(
            f"A picture is there for {', '.join(KINDS)}, got the results of {name!r}. Give the "
            "results.json of one of those."
        )
    kind, groups = KINDS[name], Groups()
    for row in found["rows"]:
        if row.get(kind.ratio) is not None:
            group = groups.setdefault(kind.group.format(**row), {})
            group.setdefault(row[kind.label], []).append(row[kind.ratio])
    return groups


def draw(found: dict[str, Any]) -> str:
    """The picture of what ``results.json`` holds, as a self-contained SVG."""
    groups, kind = groups_of(found), KINDS[found["name"]]
    ratios = [value for rows in groups.values() for dots in rows.values() for value in dots]
    low = min(0.95, *(value["low"] for value in ratios))
    high = max(1.05, *(value["high"] for value in ratios))
    scale = _Scale(low, high)
    height = _HEAD + sum(_GROUP + _ROW * len(rows) for rows in groups.values()) + _FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">',
        f"<title>{escape(kind.title)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="card" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>',
        _text("title", _MARGIN, 32, kind.title),
        _text("note", _MARGIN, 50, _origin(found)),
        *scale.grid(_HEAD, height - _FOOT),
    ]
    top = _HEAD
    for name, rows in groups.items():
        lines.append(_text("name", _MARGIN, top + 20, name))
        top += _GROUP
        for label, dots in rows.items():
            lines.append(_text("label", _MARGIN + 12, top + 13, label))
            for index, value in enumerate(dots):
                shade = 2 if len(dots) == 1 else min(2, 3 * index // len(dots))
                lines += _dot(scale, value, top + 9.5, shade)
            top += _ROW
    return "\n".join([*lines, "</svg>"]) + "\n"


def _origin(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"{found['command']} on {machine['cores']} cores of {machine['cpu']}, {found['begun']}; "
        "median and quartiles"
    )


class _Scale:
    """Places of ratios from left to right."""

    def __init__(self, low: float, high: float) -> None:
        steps = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
        self._step = next((s for s in steps if (high - low) / s <= 12), steps[-1])
        self._low = self._step * int(low / self._step + 1e-9)
        self._high = self._step * -int(-high / self._step - 1 + 1e-9)

    def __call__(self, value: float) -> float:
        width = _WIDTH - 2 * _MARGIN - _LABEL
        return _MARGIN + _LABEL + width * (value - self._low) / (self._high - self._low)

    def grid(self, top: float, bottom: float) -> Iterator[str]:
        count = round((self._high - self._low) / self._step)
        for index in range(count + 1):
            value = self._low + index * self._step
            kind = "one" if abs(value - 1) < 1e-9 else "grid"
            x = self(value)
            yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
            yield _text("note middle", x, bottom + 18, f"{value:g}")


def _dot(scale: _Scale, value: dict[str, float], y: float, shade: int) -> Iterator[str]:
    left, right, x = (scale(value[key]) for key in ("low", "high", "median"))
    kind = f"dot{shade}"
    yield f'<line class="{kind}" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>'
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="4"/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results.json of limit, hand or alternatives")
    parser.add_argument("picture", type=Path, help="the file to write, such as docs/speed.svg")
    asked = parser.parse_args()
    asked.picture.write_text(draw(json.loads(asked.results.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
