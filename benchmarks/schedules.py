"""Writes docs/schedules.md: what the simulation says of every schedule.

    python -m benchmarks.schedules

Rows, columns and figures follow the table of schedules; the words on when to take one are below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lightning_pipeline.actions import action_lists
from lightning_pipeline.draw.steps import Step, peaks_of
from lightning_pipeline.lowering import Transfer, lower
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule
from lightning_pipeline.simulate import StageTime

PAGE = Path(__file__).parents[1] / "docs" / "schedules.md"
RANKS = (2, 4, 8)
MICROBATCHES = (8, 16, 32)
EQUAL, UNEQUAL = StageTime(1, 1, 1), StageTime(1, 1.2, 0.8)
MESSAGES = (0.0, 0.1, 0.25, 0.5)
YARDSTICK = get_schedule("1F1B")  # what a strategy runs unless told otherwise

# When to take a schedule, by its name; one without words is listed with what it asks for alone.
ADVICE = {
    "GPipe": "When messages are slow or microbatches fewer than stages, and memory is plenty. "
    "Otherwise 1F1B takes the same time and holds less.",
    "1F1B": "The default, and the right one for most: fewest messages, few activations, any model "
    "that can be cut once a rank. More microbatches make its bubble smaller, slow messages larger.",
    "Interleaved1F1B": "When 1F1B waits too much and microbatches can't be more: with two stages a "
    "rank little more than half of the bubble, for some more memory and over twice the messages.",
    "LoopedBFS": "When messages are slow and memory is plenty: it loses less to them than "
    "Interleaved1F1B, and holds every microbatch. With free ones the two take the same time.",
    "InterleavedZeroBubble": "When ranks should hardly wait and microbatches are no more than the "
    "ranks, or more than two stages a rank are wanted: gradients of weights fill the gaps.",
    "ZBVZeroBubble": "When ranks should hardly wait, in the memory of 1F1B: with twice as many "
    "microbatches as ranks none waits less if messages are free. Both ends of the model are on one "
    "rank, so tied embeddings are together.",
    "DualPipeV": "By these numbers never: ZBVZeroBubble waits no longer and holds less. It pairs "
    "forwards with backwards so that messages inside of layers (experts) are hidden; here the two "
    "of a pair run one after the other.",
    "ZBH1": "Instead of 1F1B where the model is cut once a rank: about a third of its bubble, in "
    "the same memory and with the same messages.",
    "ZBH2": "When messages are slow and memory is there for nearly twice what 1F1B holds: with one "
    "stage a rank, few messages that none loses less to. Without a barrier between steps, a rank "
    "that has begun does not wait.",
    "VHalf": "When activations decide what fits: towards half of those of 1F1B, the more ranks the "
    "nearer. Unequal times and slow messages stretch it, and VMin, most of all.",
    "VMin": "When activations decide what fits and VHalf still holds too much: towards a third of "
    "those of 1F1B, for a larger bubble.",
}

HEAD = """\
# Which schedule when

Every number here is computed by `lightning_pipeline.simulate` from the order of work that runs, for
stages of equal cost; none is measured ([speed.md](speed.md) has what is). The page is written by

    python -m benchmarks.schedules

and a test compares the two. To see the orders, and with other sizes and times:

    lightning-pipeline draw schedule=1f1b ranks=4 microbatches=8
    lightning-pipeline draw output=schedules.html   # all of them, with sliders
    lightning-pipeline draw schedule=orders.csv     # your own, a row of actions for each rank

`message=0.2 transfer=0.1` gives messages a latency and a time on their link (bytes / bandwidth);
`plan` and `train` take `schedule=orders.csv`, too.

- **Bubble**: the share of the ranks' time in which they wait.
- **In flight**: how many microbatches' activations the fullest rank holds, in those of its whole
  part.
- **Messages**: how many a microbatch sends from rank to rank, there and back. They are free in the
  tables of sizes; the last table is about slow ones.
- **F:I:W**: times of a forward, of the gradients of inputs and of those of weights. 1:1.2:0.8 is
  nearer to attention, whose backward has a part without weights.
- **-**: the schedule can't run with these sizes."""


class Figures(NamedTuple):
    """What the simulation says of one step.

    Attributes:
        bubble: Share of the ranks' time that nothing fills, 0 to 1.
        peak: Activations on the fullest rank, in those of its whole part.
        messages: Messages that one microbatch sends between ranks.
    """

    bubble: float
    peak: float
    messages: float


@cache
def figures(
    schedule: Schedule, ranks: int, microbatches: int, time: StageTime, message: float = 0.0
) -> Figures | None:
    """Simulates a step; ``None`` if the schedule can't run with these sizes."""
    v = schedule.default_stages_per_rank
    if not schedule.allows_microbatches(microbatches, ranks, v):
        return None
    timeline = Step(ranks, microbatches, time, message).timeline(schedule)
    lowered = lower(action_lists(schedule, ranks, v, microbatches), ranks * v)
    sent = sum(isinstance(step, Transfer) and step.sends for row in lowered for step in row)
    return Figures(timeline.bubble, max(peaks_of(timeline)), sent / microbatches)


def asks_for(schedule: Schedule) -> str:
    """What the table says of a schedule, in words."""
    v = schedule.default_stages_per_rank
    placed = f"{v} stage{'' if v == 1 else 's'} on a rank"
    if schedule.max_stages_per_rank is None:
        placed = f"any number of stages on a rank, {v} unless told"
    words = [placed + (", as a V" if schedule.placement == "v" else "")]
    if schedule.at_least_stages:
        words.append("a microbatch for every stage")
    if schedule.whole_rounds:
        words.append("a multiple of microbatches // ranks, such as one of the ranks")
    if schedule.splits_backward:
        words.append("a split backward")
    return "; ".join(words)


def rows_of_sizes(ranks: int) -> Iterator[str]:
    """The table of one number of ranks."""
    blank = " | " * (len(MICROBATCHES) - 1)
    heads = ["bubble, 1:1:1", "bubble, 1:1.2:0.8", "in flight"]
    yield f"| | {' | '.join(head + blank for head in heads)} | messages |"
    yield "|---" * (len(heads) * len(MICROBATCHES) + 2) + "|"
    counts = " | ".join(map(str, MICROBATCHES))
    yield f"| microbatches | {' | '.join([counts] * len(heads))} | |"
    for schedule in SCHEDULES:
        equal = [figures(schedule, ranks, m, EQUAL) for m in MICROBATCHES]
        unequal = [figures(schedule, ranks, m, UNEQUAL) for m in MICROBATCHES]
        cells = [_percent(found) for found in (*equal, *unequal)]
        cells += ["-" if found is None else f"{found.peak:g}" for found in equal]
        sent = {f"{found.messages:g}" for found in equal if found is not None}
        yield f"| {schedule.name} | {' | '.join(cells)} | {' or '.join(sorted(sent))} |"


def rows_of_messages(ranks: int, microbatches: int) -> Iterator[str]:
    """The table of messages that take time."""
    yield f"| a message takes | {' | '.join(f'{message:g} F' for message in MESSAGES)} |"
    yield "|---" * (len(MESSAGES) + 1) + "|"
    for schedule in SCHEDULES:
        found = [figures(schedule, ranks, microbatches, EQUAL, message) for message in MESSAGES]
        yield f"| {schedule.name} | {' | '.join(map(_percent, found))} |"


def rows_of_choices() -> Iterator[str]:
    """The table of what is best, for each size."""
    within = f"in the memory of {YARDSTICK.name}"
    yield f"| ranks | microbatches | least bubble | {within} | least memory |"
    yield "|---|---|---|---|---|"
    for ranks in RANKS:
        for m in MICROBATCHES:
            found = {entry: figures(entry, ranks, m, EQUAL) for entry in SCHEDULES}
            runs = {entry: each for entry, each in found.items() if each is not None}
            limit = runs[YARDSTICK].peak
            within = {entry: each for entry, each in runs.items() if each.peak <= limit}
            cells = [
                _least(runs, lambda each: (each.bubble, each.peak, each.messages)),
                _least(within, lambda each: (each.bubble, each.peak, each.messages)),
                _least(runs, lambda each: (each.peak, each.bubble, each.messages)),
            ]
            yield f"| {ranks} | {m} | {' | '.join(cells)} |"


def _least(found: Mapping[Schedule, Figures], key: Callable[[Figures], tuple[float, ...]]) -> str:
    """The schedules with the least key, and their bubble and peak."""
    keys = {entry: tuple(round(value, 9) for value in key(each)) for entry, each in found.items()}
    best = [entry for entry in found if keys[entry] == min(keys.values())]
    each = found[best[0]]
    names = ", ".join(entry.name for entry in best)
    return f"{names}: {_percent(each)}, {each.peak:g} in flight"


def _percent(found: Figures | None) -> str:
    return "-" if found is None else f"{100 * found.bubble:.1f} %"


def page() -> str:
    """Returns the text of the page."""
    sizes = "".join(
        f"\n\n## {ranks} ranks\n\n" + "\n".join(rows_of_sizes(ranks)) for ranks in RANKS
    )
    words = (
        f"- **{entry.name}** ({asks_for(entry)}). {ADVICE.get(entry.name, '')}"
        for entry in SCHEDULES
    )
    advice = "\n".join(textwrap.fill(text, 100, subsequent_indent="  ") for text in words)
    choices, messages = "\n".join(rows_of_choices()), "\n".join(rows_of_messages(4, 16))
    return (
        f"{HEAD}\n\n## When to take which\n\n{advice}\n\n## The best for each size\n\n"
        "For F:I:W = 1:1:1 and free messages. Ties are decided by the other of bubble and memory,\n"
        f"then by messages.\n\n{choices}{sizes}\n\n"
        "## Messages that take time\n\n"
        "The bubble for 4 ranks and 16 microbatches, F:I:W = 1:1:1. F is the time of a forward on "
        "a rank's\nwhole part; computing goes on while messages travel.\n\n"
        f"{messages}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
