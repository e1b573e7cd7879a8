"""Measured seconds in place of amounts of work: ``balance_by="time"`` of the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from lightning_pipeline.planning.loads import Load
from lightning_pipeline.splitting import Rates
from lightning_pipeline.splitting.cost import PieceWork, Work
from lightning_pipeline.steps import Survey
from lightning_pipeline.steps.analyst import Analysis
from lightning_pipeline.timing import PieceSeconds, measure

_TICK = 1e-9
"""Seconds of what was too short to be measured, but is something."""


def measure_work(
    survey: Survey,
    analyses: Sequence[Analysis],
    own: Load,
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    rates: Rates,
) -> Load:
    """Runs the pieces of a step's calls, cut or not, and puts their seconds in their recordings.

    What does not run by itself keeps its cost, in the proportion of the others: pieces that
    made-up values do not suit, calls without a recording, and the step's own code.

    Args:
        survey: What the step calls; its calls' costs are replaced.
        analyses: What is known of each call; the work of their recordings is replaced.
        own: What the step's own code does.
        context: The precision plugin's context of the step.
        device: Where the pieces run.
        rates: The rates of costs.

    Returns:
        What the step's own code does, in seconds.
    """
    modules = [module for _, module in survey.targets]
    programs = [seen.program if seen.cuttable else seen.alone for seen in analyses]
    found = measure(programs, modules, context, device, splits=True)
    known = {
        id(seen): (seen.program.work, _of_pieces(seen, seconds, rates))
        for seen, seconds in zip(analyses, found, strict=True)
        if seconds and seen.program is not None
    }
    scale = _scale(known.values(), rates)
    for works, each in known.values():
        works[:] = [_as_measured(*pair, rates, scale) for pair in zip(works, each, strict=True)]
    for call, seen in zip(survey.calls, analyses, strict=True):
        if seen.program is None:
            call.cost = [cost * scale for cost in call.cost]
            continue
        costs = [work.seconds(rates) for work in seen.program.work]
        call.cost = costs if seen.cuttable else [sum(costs)]
    work = _as_measured(PieceWork(own.forward, own.backward, own.weight), None, rates, scale)
    return replace(own, forward=work.forward, backward=work.backward, weight=work.weight)


_Seconds = Sequence[PieceSeconds | None]


def _of_pieces(seen: Analysis, seconds: _Seconds, rates: Rates) -> _Seconds:
    """Seconds of each piece of a recording; a call that ran as a whole has its pieces' costs."""
    assert seen.program is not None
    if seen.cuttable:
        return seconds
    [whole], work = seconds, seen.program.work
    if whole is None:
        return [None] * len(work)
    costs = [[part.seconds(rates) for part in piece] for piece in work]
    sums = [sum(column) for column in zip(*costs, strict=True)]
    return [
        PieceSeconds(
            *(c / s * all_ if s else 0.0 for c, s, all_ in zip(piece, sums, whole, strict=True))
        )
        for piece in costs
    ]


def _scale(known: Iterable[tuple[list[PieceWork], _Seconds]], rates: Rates) -> float:
    """Measured seconds for a second of cost."""
    took = cost = 0.0
    for works, seconds in known:
        for work, each in zip(works, seconds, strict=True):
            if each is not None:
                took += each.forward + each.backward
                cost += work.seconds(rates)
    return took / cost if cost else 1.0


def _as_measured(
    work: PieceWork, seconds: PieceSeconds | None, rates: Rates, scale: float
) -> PieceWork:
    given = seconds or [part.seconds(rates) * scale for part in work]
    parts = (
        Work() if part == Work() else Work(measured=max(value, _TICK))
        for part, value in zip(work, given, strict=True)
    )
    return PieceWork(*parts)
