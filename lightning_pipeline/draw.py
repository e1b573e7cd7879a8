"""Pictures of timelines: a grid for the terminal and a self-contained SVG.

The picture in the README is drawn by

    python -m lightning_pipeline.draw docs/schedules.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.schedules import SCHEDULES
from lightning_pipeline.simulate import Span, StageTime, Timeline, simulate

_LABELS: tuple[Callable[[Action], str], ...] = (
    str,
    lambda action: f"{action.op}{action.microbatch}",
    lambda action: action.op,
)


def draw_text(timeline: Timeline, width: int = 120) -> str:
    """Draws a timeline as a grid: one row a rank, time to the right, dots where a rank waits.

    Example:
        >>> lists = action_lists(get_schedule("1F1B"), ranks=2, stages_per_rank=1, microbatches=2)
        >>> print(draw_text(simulate(lists, [StageTime(1, 1, 1)] * 2)))
        rank 0  0F0 0F1 ... ... 0B0---- ... 0B1----
        rank 1  ... 1F0 1B0---- 1F1 1B1---- ... ...
        bubble 33.3 %

    Args:
        timeline: What ``simulate`` returned.
        width: Columns of the terminal. Labels are shortened, then left out, to keep to it.
    """
    head = len(f"rank {len(timeline.spans) - 1}  ")
    # Actions that take no time have no width to be drawn in.
    rows = [[span for span in row if span.end > span.start] for row in timeline.spans]
    label, cell, scale = _fit(rows, timeline.makespan, width - head)
    lines = []
    for rank, row in enumerate(rows):
        line, now = f"rank {rank}".ljust(head), 0
        for action, start, end in row:
            # Rounding down keeps the shortest action a whole cell wide, up to float noise.
            left, right = int(start * scale + 1e-6), int(end * scale + 1e-6)
            line += _waiting(left - now, cell)
            if cell:
                line += label(action).ljust(right - left - 1, "-") + " "
            else:
                line += action.op * (right - left)
            now = right
        line += _waiting(int(timeline.makespan * scale + 1e-6) - now, cell)
        lines.append(line.rstrip())
    return "\n".join([*lines, f"bubble {100 * timeline.bubble:.1f} %"])


def _fit(
    rows: Sequence[Sequence[Span]], makespan: float, width: int
) -> tuple[Callable[[Action], str], int, float]:
    """The longest labels that fit, the columns of a cell (0: none fit), and columns a second."""
    shortest = min((end - start for row in rows for _, start, end in row), default=1.0)
    for label in _LABELS:
        # A cell ends in a blank.
        cell = max((len(label(span.action)) for row in rows for span in row), default=1) + 1
        if makespan / shortest * cell <= width:
            return label, cell, cell / shortest
    return _LABELS[-1], 0, width / makespan


def _waiting(size: int, cell: int) -> str:
    dots = "".join(" " if cell and i % cell == cell - 1 else "." for i in range(size))
    return dots[:-1] + " " if cell and dots else dots


_WIDTH, _MARGIN, _LABEL = 900, 20, 16
_DIGIT = 5.3  # width of one in a cell
_HEADER, _HEADING, _ROW, _PITCH, _GAP, _FOOTER = 76, 20, 17, 19, 13, 24

# The kinds of work differ in lightness as well as in hue, so that they stay apart in print and for
# readers who don't see the hues. Plain rules instead of variables: every renderer knows them.
_STYLE = """\
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
.card { fill: #ffffff; stroke: #d5dbe3; } .idle { fill: #e9edf2; }
.title { font-size: 17px; font-weight: 600; fill: #1b2430; }
.name { font-size: 13px; font-weight: 600; fill: #1b2430; }
.note { font-size: 11px; fill: #5d6876; } .end { text-anchor: end; }
.cell { font-size: 9.5px; text-anchor: middle; }
.F0 { fill: #2f66ad; } .F1 { fill: #8fb4e3; } .B0 { fill: #1c7d64; } .B1 { fill: #84cdb4; }
.W0 { fill: #e3a32c; } .W1 { fill: #f5d88f; } .on { fill: #ffffff; } .off { fill: #17202b; }
@media (prefers-color-scheme: dark) {
.card { fill: #151b23; stroke: #313944; } .idle { fill: #262e39; }
.title, .name { fill: #e8edf3; } .note { fill: #98a4b3; }
}"""
_LEGEND = (("F", "forward"), ("B", "backward (of inputs, if split)"), ("W", "backward of weights"))


def draw_svg(timelines: Mapping[str, Timeline], title: str) -> str:
    """Draws timelines under one another, on one scale of time, as a self-contained SVG.

    Colour is the kind of work, a lighter shade a later stage of the same rank, the number in a
    cell its microbatch, and the pale ground the time in which a rank waits. The picture is legible
    on light and dark pages.

    Args:
        timelines: For each block of rows, its heading and what ``simulate`` returned.
        title: Heading of the picture.

    Returns:
        The text of the SVG file.
    """
    scale = (_WIDTH - 2 * _MARGIN - _LABEL) / max(t.makespan for t in timelines.values())
    body: list[str] = []
    top = _HEADER
    for name, timeline in timelines.items():
        body += _block(name, timeline, top, scale)
        top += _HEADING + _PITCH * len(timeline.spans) + _GAP
    height = top + _FOOTER
    left, arrow = _MARGIN + _LABEL, top + 2
    size = f'width="{_WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="card" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>',
        _text("title", _MARGIN, 32, title),
        *_legend(),
        *body,
        _text("note", left, arrow + 4, "time \N{RIGHTWARDS ARROW}"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _block(name: str, timeline: Timeline, top: float, scale: float) -> Iterator[str]:
    """One schedule: a heading with its key figures, and one row for each rank."""
    stages = [sorted({span.action.stage for span in row}) for row in timeline.spans]
    kept = max(n / len(own) for n, own in zip(timeline.peak_activations, stages, strict=True))
    left, right = _MARGIN + _LABEL, _WIDTH - _MARGIN
    plural = "" if len(stages[0]) == 1 else "s"
    yield (
        f'<text x="{left}" y="{top + 13}"><tspan class="name">{escape(name)}</tspan>'
        f'<tspan class="note" dx="10">{len(stages[0])} stage{plural} a rank, activations of '
        f"up to {_number(kept)} microbatches</tspan></text>"
    )
    yield _text("name end", right - 42, top + 13, f"{100 * timeline.bubble:.1f} %")
    yield _text("note end", right, top + 13, "bubble")
    for rank, row in enumerate(timeline.spans):
        y = top + _HEADING + rank * _PITCH
        yield _text("note", _MARGIN, y + 12.5, str(rank))
        yield _rect("idle", left, y, timeline.makespan * scale)
        for (stage, op, microbatch), start, end in row:
            kind, shade = "B" if op == "I" else op, min(1, stages[rank].index(stage))
            x, width = left + start * scale, (end - start) * scale
            # The hairline between cells is the ground showing through.
            yield _rect(f"{kind}{shade}", x, y, max(width - 0.8, 0.0))
            ink = "off" if shade or kind == "W" else "on"
            if width > _DIGIT * len(str(microbatch)):
                yield _text(f"cell {ink}", x + width / 2 - 0.4, y + 12, str(microbatch))


def _legend() -> Iterator[str]:
    x = float(_MARGIN)
    for kind, meaning in _LEGEND:
        yield _rect(f"{kind}0", x, 46, 14, 14)
        yield _rect(f"{kind}1", x + 15, 46, 14, 14)
        yield _text("note", x + 35, 57, meaning)
        x += 54 + 5.3 * len(meaning)
    yield _rect("idle", x, 46, 29, 14)
    yield _text("note", x + 35, 57, "waiting")
    yield _text("note end", _WIDTH - _MARGIN, 57, "lighter: the later stage of a rank")


def _rect(kind: str, x: float, y: float, width: float, height: float = _ROW) -> str:
    return (
        f'<rect class="{kind}" x="{_number(x)}" y="{_number(y)}" '
        f'width="{_number(width)}" height="{_number(height)}" rx="2"/>'
    )


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{_number(x)}" y="{_number(y)}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def draw_schedules(ranks: int = 4, microbatches: int = 8) -> str:
    """Draws every schedule on the same model: the picture of the README.

    Args:
        ranks: Number of ranks in one pipeline.
        microbatches: Number of microbatches in a step.

    Returns:
        The text of the SVG file.
    """
    timelines = {}
    for schedule in SCHEDULES:
        v = schedule.default_stages_per_rank
        lists = action_lists(schedule, ranks, v, microbatches)
        # The same model everywhere: a rank's whole share takes one unit for each kind of work.
        timelines[schedule.name] = simulate(lists, [StageTime(1 / v, 1 / v, 1 / v)] * (ranks * v))
    return draw_svg(
        timelines, f"One step of the same model: {ranks} ranks, {microbatches} microbatches"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws every schedule into one SVG file.")
    parser.add_argument("path", type=Path, help="the file to write, such as docs/schedules.svg")
    parser.parse_args().path.write_text(draw_schedules(), encoding="utf-8")
