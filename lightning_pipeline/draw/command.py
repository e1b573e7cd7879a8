"""What ``lightning-pipeline draw`` does."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_pipeline.draw.page import draw_page
from lightning_pipeline.draw.png import draw_png
from lightning_pipeline.draw.steps import Step
from lightning_pipeline.draw.svg import draw_svg
from lightning_pipeline.draw.text import draw_texts
from lightning_pipeline.layout import check_microbatches
from lightning_pipeline.schedules import (
    MICROBATCHES_PER_RANK,
    SCHEDULES,
    Auto,
    Schedule,
    Sizes,
    get_schedule,
    require_count,
)
from lightning_pipeline.simulate import StageTime
from lightning_pipeline.wording import one_of

FORMATS = ("text", "svg", "png", "html")
_RANKS, _MICROBATCHES = 4, 8
Steps = dict[Schedule, Step]


def draw(
    schedules: str | Sequence[str] = "all",
    ranks: int | Auto = "auto",
    stages: int | None = None,
    stages_per_rank: int | Auto = "auto",
    microbatches: int | Auto | None = None,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    message: float = 0.0,
    transfer: float = 0.0,
    format: str | Auto = "auto",
    output: str | None = None,
) -> None:
    """Draws one step under one or several schedules, on one scale of time.

    Args:
        schedules: One name of a schedule or several; ``"all"`` is the whole table.
        ranks: Number of ranks in one pipeline; ``"auto"`` is 4, or that of a schedule's file.
        stages: Number of stages in one pipeline, from which the ranks then follow.
        stages_per_rank: Number of stages on each rank; ``"auto"`` is the schedule's default.
        microbatches: Number of microbatches in a step; ``None`` is 8 and ``"auto"`` four a rank, or
            either that of a schedule's file.
        forward: Time of a microbatch's forward on the whole part of one rank, in any unit.
        backward_input: Time of its gradients of inputs.
        backward_weight: Time of its gradients of weights.
        message: Latency of a message to another rank.
        transfer: Time that a message occupies its link: its bytes over the bandwidth.
        format: One of ``FORMATS``; ``"auto"`` is the ending of ``output``, or else ``"text"``.
        output: The file to write; ``None`` prints, a PNG excepted.

    Raises:
        ValueError: If an argument is none of these, or a schedule can't run with these sizes.
        ModuleNotFoundError: If a PNG is asked for without matplotlib.
    """
    format = _format(format, output)
    time = StageTime(forward, backward_input, backward_weight)
    names = [schedules] if isinstance(schedules, str) else list(schedules)
    table = list(SCHEDULES) if names == ["all"] else [get_schedule(name) for name in names]
    if not table:
        raise ValueError(
            "There must be a schedule to draw, got none. The names come from schedule=[]. "
            "Set schedule=all."
        )
    steps = {}
    for entry in table:
        v = entry.resolve_stages_per_rank(stages_per_rank)
        count, m = _sizes(entry, ranks, stages, v, microbatches)
        if format != "html":  # a page says itself what can't run
            check_microbatches(entry, count, v, m)
        steps[entry] = Step(count, m, time, message, transfer, stages_per_rank)
    content = _content(format, steps)
    if output is not None:
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        print(f"picture: {path}")
    else:
        assert isinstance(content, str), format
        print(content.rstrip("\n"))


def _format(format: str, output: str | None) -> str:
    chosen = format
    if format == "auto":
        chosen = "text" if output is None else Path(output).suffix.lower().lstrip(".")
        chosen = "text" if chosen == "txt" else chosen
    if chosen not in FORMATS:
        raise ValueError(
            f"The format must be one of {', '.join(FORMATS)}, got {chosen!r}. It comes from "
            f"format={format} and output={output}. Set format=svg, for instance."
        )
    if chosen == "png" and output is None:
        raise ValueError(
            "A PNG needs a file, got output=null. The value comes from format=png without an "
            "output. Set output=schedules.png."
        )
    return chosen


def _sizes(
    schedule: Schedule,
    ranks: int | Auto,
    stages: int | None,
    v: int,
    microbatches: int | Auto | None,
) -> tuple[int, int]:
    """Numbers of ranks and of microbatches."""
    default = schedule.sizes or Sizes(_RANKS, 0)
    count = default.ranks if ranks == "auto" else ranks
    if stages is not None:
        count = _ranks(schedule, stages, v)
    require_count("ranks", count)
    schedule.check_ranks(count)
    if microbatches is None:
        microbatches = default.microbatches or _MICROBATCHES
    if microbatches == "auto":
        microbatches = default.microbatches or MICROBATCHES_PER_RANK * count
    return count, microbatches


def _ranks(schedule: Schedule, stages: int, v: int) -> int:
    require_count("stages", stages)
    if stages % v:
        raise ValueError(
            f"{schedule.name} needs a multiple of {v} stages, one for each of the {v} on a rank, "
            f"got {stages}. The number comes from stages={stages}. "
            f"Set stages={stages // v * v + v}."
        )
    return stages // v


def _content(format: str, steps: Steps) -> str | bytes:
    step, *others = steps.values()
    if format == "html":
        if any(other != step for other in others):
            counts = sorted({each.ranks for each in steps.values()})
            sizes = sorted({each.microbatches for each in steps.values()})
            raise ValueError(
                f"A page needs one number of ranks and of microbatches for all schedules, got "
                f"{counts} and {sizes}. They come from stages over the stages on a rank, and from "
                f"schedules in files. Set stages=null, ranks={step.ranks} and "
                f"microbatches={step.microbatches}."
            )
        return draw_page(list(steps), step)
    timelines = {entry.name: each.timeline(entry) for entry, each in steps.items()}
    if len({(each.ranks, each.microbatches) for each in steps.values()}) > 1 and any(
        entry.sizes for entry in steps
    ):
        raise ValueError(
            "Schedules beside one of a file must have its ranks and microbatches, got "
            + ", ".join(
                f"{each.ranks} and {each.microbatches} for {entry.name}"
                for entry, each in steps.items()
            )
            + f". Set ranks={step.ranks} microbatches={step.microbatches}, or draw each by itself."
        )
    if format == "text":
        return draw_texts(timelines, _columns())
    ranks = one_of(sorted({each.ranks for each in steps.values()}), "rank")
    counts = sorted({each.microbatches for each in steps.values()})
    title = f"One step of the same model: {ranks}, {one_of(counts, 'microbatch', 'es')}"
    return draw_png(timelines, title) if format == "png" else draw_svg(timelines, title)


def _columns() -> int:
    """Columns of the terminal, or enough for a small step where there is none."""
    return shutil.get_terminal_size((200, 24)).columns if sys.stdout.isatty() else 200
