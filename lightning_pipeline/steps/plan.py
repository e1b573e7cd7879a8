"""Which stage runs which pieces of a step's calls, and what crosses the boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.errors import SplitError, StepError
from lightning_pipeline.splitting import (
    StageFunction,
    canonical_names,
    cuts_at,
    partition,
    partition_uniform,
    repeated_blocks,
    state_items,
)
from lightning_pipeline.steps.analyst import PLAIN
from lightning_pipeline.steps.attributes import Path
from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.checks import with_ways_out
from lightning_pipeline.steps.handmade import HandMade, check
from lightning_pipeline.steps.order import Order
from lightning_pipeline.steps.pending import TensorMeta
from lightning_pipeline.steps.survey import Survey

PartitionSpec = Literal["auto", "uniform"] | Sequence[str]

# Joined calls keep a weight on one stage; replicas of it are worth their memory only if they
# shorten the largest stage by this factor.
_REPLICATE_BELOW = 0.7


@dataclass(frozen=True)
class Carried:
    """One tensor that crosses a boundary: a finished call's output or a cut call's live value."""

    call: int
    key: int
    meta: TensorMeta


@dataclass
class Placement:
    """Where every parameter and buffer lives; fixed for the whole run.

    Attributes:
        num_stages: Number of stages.
        holders: Stages that hold each parameter and buffer, by canonical name.
    """

    num_stages: int
    holders: dict[str, frozenset[int]]

    def stages_of(self, names: frozenset[str]) -> frozenset[int] | None:
        """Stages that hold all of ``names``; ``None`` if that is no restriction."""
        held = [self.holders[name] for name in names if name in self.holders]
        return frozenset.intersection(*held) if held else None


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
        grown: Where the LightningModule's lists are that the step appends to.
        assigned: Names of the LightningModule's other attributes that the step sets.
        reads: Names of its attributes that the step reads.
        targets: The modules whose calls are cut, with their names.
        by_hand: The stages that the user has made.
        stage_cost: Seconds of each stage, forward and backward.
        stage_names: Module names of each stage's pieces.
        survey_error: What the survey's run raised behind the last call.
    """

    step: str
    num_stages: int
    calls: list[Call]
    cuts: list[list[int]]
    writes_batch: bool
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


def place(
    module: LightningModule,
    surveys: Sequence[Survey],
    num_stages: int,
    *,
    spec: PartitionSpec,
    seconds_per_byte: float,
) -> Placement:
    """Decides where every parameter and buffer of ``module`` lives.

    Args:
        module: The LightningModule, all weights present.
        surveys: What the steps of the run call. The first one decides; the others must be able to
            follow, and place what they alone use.
        num_stages: Number of stages.
        spec: ``"auto"`` balances cost, ``"uniform"`` counts blocks, a list names the modules that
            begin a new stage.
        seconds_per_byte: Price of sending one byte over a boundary.

    Raises:
        ValueError: If the names of ``spec`` do not fit the model.
        SplitError: If a called module cannot be cut and stages stay empty for that, or the steps
            run modules in contrary orders.
    """
    first, *others = surveys
    if first.by_hand is not None:
        check(first.by_hand, spec, [call.name for call in first.calls])
        spec = first.by_hand.names[1:]
    order, cuts = _first_cut(module, first.calls, num_stages, spec, seconds_per_byte)
    if any(a == b for a, b in pairwise([0, *cuts, len(order.units)])):
        # An empty stage is fine for a tiny model, not for one that could be cut if it were mended.
        for call in first.calls:
            if call.reason is not None:
                raise with_ways_out(call.reason, module, call.name)
    holders: dict[str, frozenset[int]] = {}
    _hold(holders, first, order, cuts, num_stages)
    for other in others:
        order = Order(other.calls, woven=True)
        cuts = _cut_for(order, Placement(num_stages, holders), seconds_per_byte)
        _hold(holders, other, order, cuts, num_stages)
    called = frozenset().union(*(r for s in surveys for call in s.calls for r in call.reads))
    canonical, everywhere = canonical_names(module), frozenset(range(num_stages))
    buffers = {name for *_, name, t in state_items(module) if not isinstance(t, nn.Parameter)}
    complete: dict[str, frozenset[int]] = {}
    previous = frozenset({0})
    for name in dict.fromkeys(canonical.values()):
        if name in buffers - called:  # it is there for hooks, which run on every rank
            complete[name] = everywhere
            continue
        # What no call used goes with its predecessor, so that unused weights are saved and moved.
        previous = holders[name] if name in holders else frozenset({min(previous)})
        complete[name] = previous
    return Placement(num_stages, complete)


def _hold(
    holders: dict[str, frozenset[int]],
    survey: Survey,
    order: Order,
    cuts: list[int],
    num_stages: int,
) -> None:
    """Adds the stages that one step needs its weights on to ``holders``."""
    bounds = [0, *cuts, len(order.units)]
    needed: dict[str, set[int]] = {}
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        for name in frozenset().union(*order.reads[begin:end]):
            needed.setdefault(name, set()).add(stage)
    for name, stages in needed.items():
        holders.setdefault(name, frozenset(stages))
    last_call = [
        max((i for unit in order.units[a:b] for i, _ in unit), default=-1)
        for a, b in pairwise(bounds)
    ]
    for name, before in survey.used.items():
        reached = {s for s in range(num_stages) if last_call[s] >= before}
        holders[name] = holders.get(name, frozenset()) | {num_stages - 1} | reached


def _cut_for(order: Order, placement: Placement, seconds_per_byte: float) -> list[int]:
    """Cuts an order such that every unit is on a stage that holds its weights."""
    allowed = [placement.stages_of(reads) for reads in order.reads]
    for name, stages in zip(order.names(), allowed, strict=True):
        if stages is not None and not stages:
            raise SplitError(
                name,
                "it needs weights that another step placed on different stages",
                "Let all steps call the same modules, or name the stages with partition=[...].",
            )
    return partition(
        order.cost,
        order.legal,
        order.bytes_at,
        placement.num_stages,
        seconds_per_byte=seconds_per_byte,
        allowed=allowed,
    )


def _first_cut(
    module: LightningModule,
    calls: list[Call],
    num_stages: int,
    spec: PartitionSpec,
    seconds_per_byte: float,
) -> tuple[Order, list[int]]:
    if spec != "auto":
        order = Order(calls, woven=True)
        names = order.names()
        if spec == "uniform":
            blocks = repeated_blocks(module)
            return order, partition_uniform(names, order.legal, num_stages, blocks)
        return order, cuts_at(names, list(spec), order.legal, num_stages)
    best: tuple[float, Order, list[int]] | None = None
    for woven in (True, False):
        order = Order(calls, woven)
        cuts = partition(
            order.cost,
            order.legal,
            order.bytes_at,
            num_stages,
            seconds_per_byte=seconds_per_byte,
        )
        largest = max(_stage_costs(order, cuts))
        if best is None or largest < _REPLICATE_BELOW * best[0]:
            best = (largest, order, cuts)
        if len(calls) == 1:
            break
    assert best is not None
    return best[1], best[2]


def _stage_costs(order: Order, cuts: list[int]) -> list[float]:
    bounds = [0, *cuts, len(order.units)]
    return [float(order.cost[a:b].sum()) for a, b in pairwise(bounds)]


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
    order = Order(survey.calls, woven=True)
    names, cuts = order.names(), _cut_for(order, placement, seconds_per_byte)
    bounds = [0, *cuts, len(order.units)]
    by_call = [[order.progress[b][i] for b in bounds] for i in range(len(survey.calls))]
    plan = StepPlan(
        step,
        placement.num_stages,
        survey.calls,
        by_call,
        survey.writes_batch,
        survey.grown,
        survey.assigned,
        survey.reads,
        survey.targets,
        survey.by_hand,
        _stage_costs(order, cuts),
        [names[a:b] for a, b in pairwise(bounds)],
        survey.error,
    )
    _check(plan, survey, placement)
    return plan


def _check(plan: StepPlan, survey: Survey, placement: Placement) -> None:
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


def describe_calls(calls: list[Any]) -> str:
    """The calls of a plan for an error message."""
    return ", ".join(call.label for call in calls)
