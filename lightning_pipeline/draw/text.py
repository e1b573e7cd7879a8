"""Timelines as a grid for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lightning_pipeline.actions import Action
from lightning_pipeline.draw.steps import peaks_of
from lightning_pipeline.simulate import Timeline

_Label = Callable[[Action], str]
_LABELS: tuple[_Label, ...] = (
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
        bubble 33.3 %, step 9, peak activations 2 1

    Peak activations are those of each rank, in microbatches of its whole part.

    Args:
        timeline: What ``simulate`` returned.
        width: Columns of the terminal. Labels are shortened, then left out, to keep to it.
    """
    return _block(timeline, _fit([timeline], width))


def draw_texts(timelines: Mapping[str, Timeline], width: int = 120) -> str:
    """Draws timelines under one another, on one scale of time, each with its heading.

    Args:
        timelines: For each grid, its heading and what ``simulate`` returned.
        width: As for `draw_text`.
    """
    grid = _fit(timelines.values(), width)
    return "\n\n".join(f"{name}\n{_block(one, grid)}" for name, one in timelines.items())


class _Grid(NamedTuple):
    """How actions become columns.

    Attributes:
        head: Columns of a row's heading.
        label: The longest label that fits.
        cell: Columns of a label and the blank behind it; 0: none fits.
        scale: Columns for one unit of time.
    """

    head: int
    label: _Label
    cell: int
    scale: float


def _fit(timelines: Iterable[Timeline], width: int) -> _Grid:
    timelines = list(timelines)
    spans = [span for one in timelines for row in one.spans for span in row if _lasts(span)]
    head = len(f"rank {max(len(one.spans) for one in timelines) - 1}  ")
    makespan = max(one.makespan for one in timelines)
    shortest = min((end - start for _, start, end in spans), default=1.0)
    for label in _LABELS:
        # A cell ends in a blank.
        cell = max((len(label(action)) for action, _, _ in spans), default=1) + 1
        if makespan / shortest * cell <= width - head:
            return _Grid(head, label, cell, cell / shortest)
    return _Grid(head, _LABELS[-1], 0, (width - head) / makespan)


def _block(timeline: Timeline, grid: _Grid) -> str:
    head, label, cell, scale = grid
    lines = []
    for rank, row in enumerate(timeline.spans):
        line, now = f"rank {rank}".ljust(head), 0
        for action, start, end in filter(_lasts, row):
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
    peaks = " ".join(f"{peak:g}" for peak in peaks_of(timeline))
    figures = f"bubble {100 * timeline.bubble:.1f} %, step {timeline.makespan:.4g}"
    return "\n".join([*lines, f"{figures}, peak activations {peaks}"])


def _lasts(span: tuple[Action, float, float]) -> bool:
    """Actions that take no time have no width to be drawn in."""
    return span[2] > span[1]


def _waiting(size: int, cell: int) -> str:
    dots = "".join(" " if cell and i % cell == cell - 1 else "." for i in range(size))
    return dots[:-1] + " " if cell and dots else dots
