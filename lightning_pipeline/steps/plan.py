"""Which stage runs which pieces of a step's calls, and what crosses the boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import StageFunction
from lightning_pipeline.splitting.pictures import generators_below
from lightning_pipeline.steps.analyst import PLAIN
from lightning_pipeline.steps.attributes import Path
from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.dependence import Expected
from lightning_pipeline.steps.handmade import HandMade
from lightning_pipeline.steps.order import Order
from lightning_pipeline.steps.pending import TensorMeta
from lightning_pipeline.steps.placement import Placement, check_own_writes, cut_for, stage_costs
from lightning_pipeline.steps.survey import Survey


@dataclass(frozen=True)
class Carried:
    """One tensor that crosses a boundary: a finished call's output or a cut call's live value."""

    call: int
    key: int
    meta: TensorMeta


@dataclass(eq=False)  # a plan is itself the key of what is cached for it
class StepPlan:
    """What each stage does with one signature of microbatch.

    Attributes:
        step: Name of the step method.
        calls: The step's calls.
        cuts: First piece of every call on each stage, shape [calls][stages + 1].
        carried: Tensors that cross into each stage, besides the fingerprints.
        last_call: Index of the last call that each stage has a part in, -1 for none.
        writes_batch: Whether the step writes to its batch.
        switches: Whether it leaves the modes of modules or ``requires_grad`` otherwise.
        grown: Where the LightningModule's lists are that the step appends to.
        assigned: Names of the LightningModule's other attributes that the step sets.
        reads: Names of its attributes that the step reads.
        targets: The modules whose calls are cut, with their names.
        by_hand: The stages that the user has made.
        stage_cost: Seconds of each stage, forward and backward.
        stage_names: Module names of each stage's pieces.
        survey_error: What the survey's run raised behind the last call.
        expected: Gradients that have come back so far.
    """

    step: str
    num_stages: int
    calls: list[Call]
    cuts: list[list[int]]
    writes_batch: bool
    switches: bool
    grown: tuple[Path, ...]
    assigned: tuple[str, ...]
    reads: frozenset[str]
    targets: list[tuple[str, nn.Module]]
    by_hand: HandMade | None
    stage_cost: list[float]
    stage_names: list[list[str]]
    survey_error: Exception | None
    carried: list[list[Carried]] = field(init=False)
    last_call: list[int] = field(init=False)
    expected: Expected = field(default_factory=Expected)
    _parts: dict[tuple[int, int], StageFunction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.carried = [self._crossing(stage) for stage in range(self.num_stages)]
        self.last_call = [
            max((i for i, cut in enumerate(self.cuts) if cut[s] < cut[s + 1]), default=-1)
            for s in range(self.num_stages)
        ]

    def module_of(self, call: int) -> nn.Module:
        """The module that is called."""
        return dict(self.targets)[self.calls[call].name]

    def part(self, call: int, stage: int) -> StageFunction:
        """The part of a cut call that ``stage`` runs; built on first use."""
        if (call, stage) not in self._parts:
            program = self.calls[call].program
            assert program is not None
            low, high = self.cuts[call][stage], self.cuts[call][stage + 1]
            self._parts[call, stage] = StageFunction(program, low, high)
        return self._parts[call, stage]

    def is_whole(self, call: int, stage: int) -> bool:
        low, high = self.cuts[call][stage], self.cuts[call][stage + 1]
        return (low, high) == (0, self.calls[call].num_pieces)

    def boundary(self, stage: int) -> list[TensorMeta]:
        """Metadata of the tensors that cross into ``stage``, without the fingerprints."""
        return [carried.meta for carried in self.carried[stage]]

    def _crossing(self, stage: int) -> list[Carried]:
        crossing = []
        for i, call in enumerate(self.calls):
            done = self.cuts[i][stage]
            if done == call.num_pieces:
                crossing += [
                    Carried(i, j, out)
                    for j, out in enumerate(call.outputs)
                    if isinstance(out, TensorMeta)
                ]
            elif done:
                assert call.program is not None
                for value in call.program.live[done]:
                    meta = TensorMeta.of(call.program.values[value])
                    trains = meta.requires_grad and call.trains
                    crossing.append(Carried(i, value, meta._replace(requires_grad=trains)))
        return crossing


def plan_step(
    step: str, survey: Survey, placement: Placement, *, seconds_per_byte: float
) -> StepPlan:
    """Cuts one signature of a step for a placed model.

    Args:
        step: Name of the step method.
        survey: What it calls.
        placement: Where the weights are.
        seconds_per_byte: Price of sending one byte over a boundary.

    Raises:
        SplitError: If the step runs its modules in an order that the placement cannot follow.
        StepError: If it uses a weight on a stage that does not hold it, or returns objects from
            a call that cannot be sent.
    """
    order = Order(survey.calls, woven=True, stages_of=placement.stages_of)
    names, cuts = order.names(), cut_for(order, placement, seconds_per_byte)
    bounds = [0, *cuts, len(order.units)]
    by_call = [[order.progress[b][i] for b in bounds] for i in range(len(survey.calls))]
    plan = StepPlan(
        step,
        placement.num_stages,
        survey.calls,
        by_call,
        survey.writes_batch,
        survey.switches,
        survey.grown,
        survey.assigned,
        survey.reads,
        survey.targets,
        survey.by_hand,
        stage_costs(order, cuts),
        [names[a:b] for a, b in pairwise(bounds)],
        survey.error,
    )
    _check(plan, survey, placement)
    return plan


def _check(plan: StepPlan, survey: Survey, placement: Placement) -> None:
    check_own_writes(survey.writes, placement)
    _check_generators(plan)
    last = placement.num_stages - 1
    for call, cut in zip(plan.calls, plan.cuts, strict=True):
        ends_early = cut[last] == call.num_pieces
        odd = [o for o in call.outputs if not isinstance(o, (TensorMeta, *PLAIN))]
        if ends_early and odd:
            raise StepError(
                f"{call.label} returns an object of type {type(odd[0]).__name__}, which cannot be "
                "sent to later stages. Return its tensors and make the object in the step."
            )
    for name, before in survey.used.items():
        for stage in range(placement.num_stages):
            if plan.last_call[stage] >= before and stage not in placement.holders[name]:
                raise StepError(
                    f"{plan.step} itself uses {name!r} on stage {stage}, where the step that the "
                    "model was placed by did not need it. Use it in all steps, or behind the last "
                    "call of a module."
                )


def _check_generators(plan: StepPlan) -> None:
    """Refuses stages that share a generator of random numbers, for each has one of its own."""
    users: dict[int, dict[int, str]] = {}
    for index, call in enumerate(plan.calls):
        program, cut = call.program, plan.cuts[index]
        whole = () if program is not None else generators_below(plan.module_of(index))
        for stage in range(plan.num_stages):
            for piece in range(cut[stage], cut[stage + 1]):
                drawn = map(id, whole) if program is None else program.generators[piece]
                for generator in drawn:
                    users.setdefault(generator, {})[stage] = call.label
    for stages in users.values():
        if len(stages) > 1:
            (first, label), (second, other) = list(stages.items())[:2]
            raise StepError(
                f"{plan.step}: {label} on stage {first} and {other} on stage {second} draw from "
                "one generator of random numbers, of which each rank has one of its own, so that "
                "they would not draw what they draw on one device. Give each of them a "
                "torch.Generator of its own, or pass what is drawn as an argument."
            )


def describe_calls(calls: list[Any]) -> str:
    """The calls of a plan for an error message."""
    return ", ".join(call.label for call in calls)
