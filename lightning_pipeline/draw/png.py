"""Timelines as a PNG, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_pipeline.actions import Action
from lightning_pipeline.draw.steps import COLOURS, LEGEND, peaks_of, stages_of
from lightning_pipeline.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _ROW, _HEADING, _FRAME, _DPI = 10.0, 0.2, 0.42, 1.1, 160  # inches, dots an inch
_INK, _NOTE, _IDLE = "#1b2430", "#5d6876", "#e9edf2"
_FEWEST_POINTS = 9.0  # a cell needs them for its number


def draw_png(timelines: Mapping[str, Timeline], title: str) -> bytes:
    """Draws timelines under one another, on one scale of time, as `draw_svg` does.

    Args:
        timelines: For each block of rows, its heading and what ``simulate`` returned.
        title: Heading of the picture.

    Returns:
        The content of the PNG file.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"format=png needs matplotlib, and {error.name} is not installed here. Install it with "
            'pip install "lightning-pipeline[plot]", or set format=svg, which needs nothing.',
            name=error.name,
        ) from error

    rows = [len(timeline.spans) for timeline in timelines.values()]
    height = _FRAME + sum(_HEADING + _ROW * count for count in rows)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", color=_INK, weight="bold")
    axes = figure.subplots(
        len(rows), sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
    )
    longest = max(timeline.makespan for timeline in timelines.values())
    points = 0.94 * 72 * _WIDTH / longest
    for (name, timeline), axis in zip(timelines.items(), axes[:, 0], strict=True):
        _block(axis, name, timeline, points)
    axes[-1, 0].set_xlim(0, longest)
    patches = [Patch(color=COLOURS[kind][0], label=text) for kind, text in LEGEND.items()]
    figure.legend(
        handles=[*patches, Patch(color=_IDLE, label="waiting; lighter: later stage of a rank")],
        loc="outside lower left",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _block(axis: Axes, name: str, timeline: Timeline, points: float) -> None:
    """One schedule: a heading with its key figures, and one row for each rank."""
    peak = max(peaks_of(timeline))
    kept = f"activations of up to {peak:g} {'microbatch' if peak == 1 else 'microbatches'}"
    style: dict[str, Any] = {"fontsize": 9, "color": _INK}
    axis.set_title(name, loc="left", weight="bold", **style)
    axis.set_title(f"{kept}, bubble {100 * timeline.bubble:.1f} %", loc="right", **style)
    ranks = range(len(timeline.spans))
    axis.barh(ranks, timeline.makespan, 0.9, color=_IDLE)
    for rank, row, stages in zip(ranks, timeline.spans, stages_of(timeline), strict=True):
        cells = [_cell(span.action, stages) for span in row]
        axis.barh(
            [rank] * len(row),
            [end - start for _, start, end in row],
            0.9,
            [start for _, start, _ in row],
            color=[fill for fill, _ in cells],
            edgecolor=_IDLE,
            lw=0.4,
        )
        for (action, start, end), (_, ink) in zip(row, cells, strict=True):
            if (end - start) * points >= _FEWEST_POINTS:
                place, style = ((start + end) / 2, rank), {"ha": "center", "va": "center"}
                axis.text(*place, str(action.microbatch), color=ink, fontsize=5.5, **style)
    axis.set_ylim(len(timeline.spans) - 0.5, -0.5)
    axis.set_yticks(ranks)
    axis.tick_params(length=0, labelsize=7, labelcolor=_NOTE, labelbottom=False)
    axis.spines[:].set_visible(False)


def _cell(action: Action, stages: Sequence[int]) -> tuple[str, str]:
    """The colours of an action and of its number."""
    kind, shade = "B" if action.op == "I" else action.op, min(1, stages.index(action.stage))
    return COLOURS[kind][shade], "#17202b" if shade or kind == "W" else "#ffffff"
