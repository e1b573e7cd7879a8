"""A self-contained HTML page that draws schedules side by side and follows its sliders.

The page computes timelines itself, by the rules of `simulate`; the orders of work it can't make,
so those of a grid of sizes travel with it, compressed.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.draw.steps import COLOURS, LEGEND, Step
from lightning_pipeline.schedules import Auto, Schedule

RANKS = tuple(range(1, 9))
MICROBATCHES = (*range(1, 17), 20, 24, 28, 32)
"""The sizes that a page has orders for."""

_OPS = "FBIW"


def draw_page(
    schedules: Sequence[Schedule],
    step: Step,
    ranks: Sequence[int] = RANKS,
    microbatches: Sequence[int] = MICROBATCHES,
) -> str:
    """Returns a page that needs neither a network nor any other file.

    Args:
        schedules: What is drawn, in this order.
        step: Where the sliders stand at first.
        ranks: Numbers of ranks that can be chosen, besides that of ``step``.
        microbatches: Numbers of microbatches that can be chosen, besides that of ``step``.

    Returns:
        The text of the HTML file.
    """
    grid_ranks = sorted({*ranks, step.ranks})
    grid_microbatches = sorted({*microbatches, step.microbatches})
    orders = [
        encode(schedule, count, step.stages_per_rank, m)
        for schedule in schedules
        for count in grid_ranks
        for m in grid_microbatches
    ]
    data = {
        "ranks": grid_ranks,
        "microbatches": grid_microbatches,
        "schedules": [_facts(schedule, step, grid_ranks) for schedule in schedules],
        "orders": base64.b64encode(zlib.compress("\n".join(orders).encode(), 9)).decode(),
        "legend": LEGEND,
        "start": {
            "ranks": step.ranks,
            "microbatches": step.microbatches,
            "forward": step.time.forward,
            "backwardInput": step.time.backward_input,
            "backwardWeight": step.time.backward_weight,
            "message": step.message,
            "transfer": step.transfer,
        },
    }
    colours = "\n".join(
        f".{kind}{shade} {{ fill: {colour}; background: {colour}; }}"
        for kind, shades in COLOURS.items()
        for shade, colour in enumerate(shades)
    )
    parts = {
        "STYLE": _read("page.css") + colours,
        "SCRIPT": _read("page.js").rstrip(),
        # A name may come from a file, and must not end the script that it stands in.
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = _read("page.html")
    for name, text in parts.items():
        page = page.replace(f"/*{name}*/", text)
    return page


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _facts(schedule: Schedule, step: Step, ranks: Sequence[int]) -> dict[str, object]:
    v = schedule.resolve_stages_per_rank(step.stages_per_rank)
    return {
        "name": schedule.name,
        "placement": schedule.placement,
        "stages": [
            [schedule.stages_of_rank(rank, count, v) for rank in range(count)] for count in ranks
        ],
    }


def encode(schedule: Schedule, ranks: int, stages_per_rank: int | Auto, microbatches: int) -> str:
    """Returns the order of work in short, or nothing where the schedule can't run.

    Ranks are parted by blanks. A letter is a stage of the rank and an operation: A to D are F, B, I
    and W of its first stage, E to H of its second. Its microbatch is that behind the letter's last
    one, or the number that follows.

    Args:
        schedule: The schedule.
        ranks: Number of ranks in one pipeline.
        stages_per_rank: Number of stages on each rank.
        microbatches: Number of microbatches in a step.
    """
    v = schedule.resolve_stages_per_rank(stages_per_rank)
    try:
        schedule.check(ranks, v, microbatches)
    except ValueError:
        return ""
    lists = action_lists(schedule, ranks, v, microbatches)
    return " ".join(
        _encode_rank(row, schedule.stages_of_rank(rank, ranks, v)) for rank, row in enumerate(lists)
    )


def _encode_rank(actions: Sequence[Action], stages: Sequence[int]) -> str:
    following: dict[str, int] = {}
    words = []
    for stage, op, microbatch in actions:
        letter = chr(ord("A") + len(_OPS) * stages.index(stage) + _OPS.index(op))
        expected = following.get(letter, 0)
        words.append(letter if microbatch == expected else f"{letter}{microbatch}")
        following[letter] = microbatch + 1
    return "".join(words)
