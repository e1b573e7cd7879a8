"""An order of work that beats the schedules of the table, where there is one."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pipeline.order_files import schedule_of
from lightning_pipeline.planning.planner import Outlook
from lightning_pipeline.planning.prediction import Prediction
from lightning_pipeline.search import search_order

SEARCHED = "Searched"
"""Name of an order that is in no table and no file."""

_GAIN = 0.01
"""Part of a step by which an order must be faster than all schedules to be worth its own."""

_LAYOUTS = 3
_EFFORT = 100_000  # of the search in each of them: about a second


def searched(outlook: Outlook, name: str = SEARCHED) -> Prediction | None:
    """Searches orders of work for the layouts whose schedules are the fastest that fit.

    The result follows from the arguments alone.

    Args:
        outlook: What the planner has found.
        name: Name of the order, or the file that it is going to be in.

    Returns:
        The prediction of the best order; ``None`` if none is faster than the best schedule by 1 %.
    """
    if not outlook.fitting:
        return None
    best = fastest = outlook.fitting[0]
    for known in _layouts(outlook):
        schedule, ranks, _, depth, microbatches, _ = known.candidate
        costs = known.costs(outlook.limit)
        lists = search_order(costs, ranks, depth, microbatches, schedule.placement, _EFFORT)
        found = known.with_schedule(schedule_of(lists, name, schedule.placement, depth))
        if found.samples_per_second > best.samples_per_second:
            best = found
    return best if fastest.seconds_per_sample > (1 + _GAIN) * best.seconds_per_sample else None


def _layouts(outlook: Outlook) -> Iterator[Prediction]:
    """The fastest prediction of each of the best layouts, whatever its schedule."""
    known = set()
    for found in outlook.fitting:
        schedule, *sizes = found.candidate
        layout = schedule.placement, *sizes
        if layout not in known:
            known.add(layout)
            yield found
        if len(known) == _LAYOUTS:
            return
