"""Where a rank is in a step, for those who ask from outside of it."""

from __future__ import annotations

import textwrap

from lightning_pipeline.actions import Action
from lightning_pipeline.activities import Activity, Observer, Wait
from lightning_pipeline.lowering import Transfer
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.names import condense_names
from lightning_pipeline.plan import Plan

_DOES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_CARRIES = {"F": "values", "B": "gradients"}
_PHASES = {
    "exchange begins": "sending gradients to the replicas",
    "exchange ends": "waiting for the gradients of the replicas",
    "optimizer": "in the optimizer's step",
}
_WIDTH = 100  # of the names of a stage


class Position:
    """What a rank does at the moment; two attributes are written for each activity.

    Attributes:
        activity: What the pass that runs has begun last; ``None`` outside of passes.
        count: Number of activities so far.
    """

    def __init__(self) -> None:
        self.activity: Activity | None = None
        self.count = 0

    def note(self, activity: Activity) -> None:
        """Takes note of what the rank does from now on."""
        self.activity = activity
        self.count += 1

    def also(self, observer: Observer) -> Observer:
        """An observer that notes the position as well."""

        def both(activity: Activity) -> None:
            self.note(activity)
            observer(activity)

        return both


def describe(activity: Activity | None, mesh: Mesh, plan: Plan | None) -> str:
    """Says in words what a rank does, e.g. ``in the forward of stage 1 (net.2), microbatch 3``.

    Args:
        activity: What it does; ``None``: nothing of a pass.
        mesh: Where the rank is.
        plan: Who holds which modules, if it is known.
    """

    def stage(index: int) -> str:
        modules = plan.stages[index].modules if plan is not None else ()
        names = textwrap.shorten(condense_names(modules), _WIDTH, placeholder=" ...")
        return f"stage {index}" + (f" ({names})" if modules else "")

    def global_rank(index: int) -> int:
        per_rank = mesh.stages_per_rank
        return mesh.pipeline_ranks[
            mesh.schedule.rank_of_stage(index, len(mesh.pipeline_ranks), per_rank)
        ]

    held = " and ".join(map(stage, mesh.stages))
    if isinstance(activity, Action):
        at = f"{stage(activity.stage)}, microbatch {activity.microbatch}"
        return f"in the {_DOES[activity.op]} of {at}"
    if isinstance(activity, Transfer):
        peer = mesh.pipeline_ranks[activity.peer]
        verb, word = ("sending", "to") if activity.sends else ("beginning to receive", "from")
        what = f"{_CARRIES[activity.kind]} of microbatch {activity.microbatch}"
        return f"{verb} the {what} for {stage(activity.stage)} {word} rank {peer}"
    if isinstance(activity, Wait) and activity.kind != "batch":
        peer = global_rank(activity.stage + (-1 if activity.kind == "F" else 1))
        what = f"{_CARRIES[activity.kind]} of microbatch {activity.microbatch}"
        return f"waiting for the {what} for {stage(activity.stage)} from rank {peer}"
    if isinstance(activity, Wait):
        return "waiting for the word of all ranks that they begin with the same batch"
    if activity is None:
        return f"between two passes over {held}"
    if activity in _PHASES:
        return f"{_PHASES[activity]} of {held}"
    return f"at the end of a pass over {held}, what it sent is not taken yet"
