"""What the planner has found, for readers and for programs."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lightning_pipeline.mesh import MeshSizes
from lightning_pipeline.names import cut_places, partition_names, stage_modules
from lightning_pipeline.orders import Lists
from lightning_pipeline.plan import Plan, make_plan
from lightning_pipeline.planning.blueprint import Drawing
from lightning_pipeline.planning.candidates import Dropped
from lightning_pipeline.planning.planner import (
    Outlook,
    best_of_each,
    describe,
    gigabytes,
    seconds_or_ms,
    twins,
)
from lightning_pipeline.planning.prediction import Prediction
from lightning_pipeline.wording import plain, plural

_COLUMNS = (
    "schedule",
    "ranks",
    "replicas",
    "stages/rank",
    "microbatches",
    "recomputed",
    "step",
    "bubble",
    "memory",
    "samples/s",
)
_SHOWN = 3
"""Dropped layouts that a line names."""

_OF_ONE_LINE = "- A = B: the same order of work; A, B: other orders, the same step and memory"

_KINDS = {
    "count": "illegal count",
    "pieces": "fewer pieces than stages, or no such cut",
}


def plan_of(found: Prediction, drawing: Drawing, notes: Sequence[str] = ()) -> Plan:
    """A prediction as the plan that its run would print."""
    candidate, plan = found.candidate, drawing.plan
    is_one_call = len(plan.calls) == 1
    return make_plan(
        candidate.schedule,
        MeshSizes(candidate.ranks, candidate.replicas),
        candidate.microbatches,
        [sum(time[:3]) for time in found.times],
        stage_modules(plan.stage_names),
        [state.parameters for state in drawing.states],
        [state.weights for state in drawing.states],
        candidate.stages_per_rank,
        notes,
        partition_names(plan.stage_names) if is_one_call else None,
        cut_places(plan.stage_names),
        timeline=found.timeline,
    )


DECIDED = ("schedule", "devices", "stages", "microbatches", "activation_checkpointing")
"""Settings of a training that a prediction has decided."""


def overrides_of(found: Prediction, num_nodes: int = 1) -> str:
    """The overrides by which ``lightning-pipeline train`` runs a prediction.

    Args:
        found: The prediction.
        num_nodes: Nodes that its ranks are spread over.
    """
    schedule, ranks, replicas, depth, microbatches, recompute = found.candidate
    words = [
        shlex.quote(f"schedule={schedule.snake}"),
        f"devices={ranks * replicas // num_nodes}",
        f"stages={ranks * depth}",
        f"microbatches={microbatches}",
    ]
    if depth != schedule.default_stages_per_rank:
        words.append(f"schedule.stages_per_rank={depth}")
    if recompute != "none":
        words.append(f"activation_checkpointing={recompute}")
    return " ".join(words)


def ranking(outlook: Outlook, most: int) -> str:
    """The table of what fits, the fastest first; schedules that come to the same share a line."""
    groups = twins(best_of_each(outlook.fitting))[:most]
    rows = [_COLUMNS, *map(_row, groups)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if name in ("schedule", "recomputed") else cell.rjust(width)
            for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    if any(len(group) > 1 for group in groups):
        lines.append(_OF_ONE_LINE)
    return "\n".join(lines)


def _names(group: Sequence[Prediction]) -> str:
    """The schedules of a line, those with one order of work beside each other."""
    known: list[tuple[Lists, list[str]]] = []
    for found in group:
        name = found.candidate.schedule.name
        names = next((names for order, names in known if order == found.lists), None)
        if names is None:
            known.append((found.lists, [name]))
        else:
            names.append(name)
    return ", ".join(" = ".join(names) for _, names in known)


def _row(group: Sequence[Prediction]) -> tuple[str, ...]:
    found = group[0]
    _, ranks, replicas, depth, microbatches, recompute = found.candidate
    return (
        _names(group),
        str(ranks),
        str(replicas),
        str(depth),
        str(microbatches),
        recompute.replace("_", " "),
        seconds_or_ms(found.seconds),
        f"{100 * found.timeline.bubble:.1f} %",
        gigabytes(found.peak),
        plain(found.samples_per_second, 4),
    )


def memory_table(found: Prediction) -> str:
    """What each rank of a pipeline holds, a line each."""
    lines = [f"memory of each rank of a pipeline, of which {gigabytes(found.reserved)} reserved:"]
    for rank, held in enumerate(found.memory):
        parts = ", ".join(
            f"{name} {gigabytes(getattr(held, name))}"
            for name in ("weights", "gradients", "optimizer", "activations", "working")
        )
        lines.append(f"  {rank}: {gigabytes(found.reserved + held.total)}: {parts}")
    return "\n".join(lines)


def reasons(outlook: Outlook) -> list[str]:
    """Why the others were dropped, a line for each kind of reason."""
    lines = []
    if outlook.too_large:
        smallest = outlook.too_large[0]
        over = gigabytes(smallest.peak - outlook.limit, up=True)
        count = len(outlook.too_large)
        lines.append(
            f"does not fit {gigabytes(outlook.limit)}: {plural(count, 'layout')}; the smallest of "
            f"them, {describe(smallest.candidate)}, by {over}"
        )
    kinds: dict[str, list[Dropped]] = defaultdict(list)
    for dropped in outlook.dropped:
        kinds[dropped.kind].append(dropped)
    for kind, group in sorted(kinds.items()):
        named = "; ".join(f"{d.what}: {d.why}" for d in group[:_SHOWN])
        more = f"; {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
        lines.append(f"{_KINDS[kind]}: {named}{more}")
    return lines


def as_data(
    outlook: Outlook, plan: Plan | None, notes: Sequence[str], num_nodes: int = 1
) -> dict[str, Any]:
    """All of it for programs: seconds, bytes, counts; overrides for so many nodes."""
    return {
        "limit": outlook.limit,
        "notes": list(notes),
        "stages": [
            {
                "index": stage.index,
                "ranks": list(stage.rank),
                "modules": list(stage.modules),
                "parameters": stage.parameters,
                "bytes": stage.bytes,
                "share": stage.share,
                "in_flight": stage.in_flight,
            }
            for stage in (plan.stages if plan is not None else ())
        ],
        "num_fitting": outlook.num_fitting,
        "fitting": [_data(found, num_nodes) for found in outlook.fitting],
        "too_large": [_data(found, num_nodes) for found in outlook.too_large],
        "dropped": [{"kind": d.kind, "what": d.what, "why": d.why} for d in outlook.dropped],
    }


def _data(found: Prediction, num_nodes: int) -> dict[str, Any]:
    schedule, ranks, replicas, depth, microbatches, recompute = found.candidate
    return {
        "schedule": schedule.name,
        "ranks": ranks,
        "replicas": replicas,
        "stages_per_rank": depth,
        "microbatches": microbatches,
        "activation_checkpointing": recompute,
        "seconds": found.seconds,
        "bubble": found.timeline.bubble,
        "samples_per_second": found.samples_per_second,
        "peak_bytes": found.peak,
        "rank_bytes": [found.reserved + held.total for held in found.memory],
        "overrides": overrides_of(found, num_nodes),
    }
