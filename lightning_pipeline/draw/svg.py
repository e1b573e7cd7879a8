"""Timelines as a self-contained SVG.

The picture in the README is drawn by

    lightning-pipeline draw output=docs/schedules.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from lightning_pipeline.draw.steps import COLOURS, LEGEND, peaks_of, stages_of
from lightning_pipeline.simulate import Timeline
from lightning_pipeline.wording import plural

_WIDTH, _MARGIN, _LABEL = 900, 20, 16
_DIGIT = 5.3  # width of one in a cell
_HEADER, _HEADING, _ROW, _PITCH, _GAP, _FOOTER = 76, 20, 17, 19, 13, 24

# Plain rules instead of variables: every renderer knows them.
_STYLE = """\
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
.card { fill: #ffffff; stroke: #d5dbe3; } .idle { fill: #e9edf2; }
.title { font-size: 17px; font-weight: 600; fill: #1b2430; }
.name { font-size: 13px; font-weight: 600; fill: #1b2430; }
.note { font-size: 11px; fill: #5d6876; } .end { text-anchor: end; }
.cell { font-size: 9.5px; text-anchor: middle; } .on { fill: #ffffff; } .off { fill: #17202b; }
@media (prefers-color-scheme: dark) {
.card { fill: #151b23; stroke: #313944; } .idle { fill: #262e39; }
.title, .name { fill: #e8edf3; } .note { fill: #98a4b3; }
}
""" + " ".join(
    f".{kind}{shade} {{ fill: {colour}; }}"
    for kind, colours in COLOURS.items()
    for shade, colour in enumerate(colours)
)


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
    stages, kept = stages_of(timeline), max(peaks_of(timeline))
    left, right = _MARGIN + _LABEL, _WIDTH - _MARGIN
    microbatches = "microbatch" if kept == 1 else "microbatches"
    yield (
        f'<text x="{left}" y="{top + 13}"><tspan class="name">{escape(name)}</tspan>'
        f'<tspan class="note" dx="10">{plural(len(stages[0]), "stage")} a rank, activations '
        f"of up to {_number(kept)} {microbatches}</tspan></text>"
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
    for kind, meaning in LEGEND.items():
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
