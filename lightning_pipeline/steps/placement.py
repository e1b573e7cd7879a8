"""Where the weights of a module live, such that all steps of a run can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.errors import SplitError, StepError
from lightning_pipeline.splitting import (
    canonical_names,
    cuts_at,
    partition,
    partition_uniform,
    repeated_blocks,
    state_items,
)
from lightning_pipeline.steps.checks import with_ways_out
from lightning_pipeline.steps.handmade import check
from lightning_pipeline.steps.order import Order, Precedence
from lightning_pipeline.steps.survey import Survey
from lightning_pipeline.steps.twins import find_twins

PartitionSpec = Literal["auto", "uniform"] | Sequence[str]

# Joined calls keep a weight on one stage; replicas of it are worth their memory only if they
# shorten the largest stage by this factor.
_REPLICATE_BELOW = 0.7


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
        surveys: What the steps of the run call. The first one decides; the others follow, place
            what they alone use, and get replicas of what they run in a contrary order.
        num_stages: Number of stages.
        spec: ``"auto"`` balances cost, ``"uniform"`` counts blocks, a list names the modules that
            begin a new stage.
        seconds_per_byte: Price of sending one byte over a boundary.

    Raises:
        ValueError: If the names of ``spec`` do not fit the model.
        SplitError: If a called module cannot be cut and stages stay empty for that, or the steps
            run modules in contrary orders of which one has running statistics.
        StepError: If steps do not agree where a buffer is that one of them writes to.
    """
    first, *others = surveys
    if first.by_hand is not None:
        check(first.by_hand, spec, [call.name for call in first.calls])
        spec = first.by_hand.names[1:]
    twins = find_twins(module, first)
    order, cuts = _first_cut(module, surveys, num_stages, spec, seconds_per_byte, twins)
    if any(a == b for a, b in pairwise([0, *cuts, len(order.units)])):
        # An empty stage is fine for a tiny model, not for one that could be cut if it were mended.
        for call in first.calls:
            if call.reason is not None:
                raise with_ways_out(call.reason, module, call.name)
    placement = Placement(num_stages, {})
    holders = placement.holders
    _hold(holders, first, order, cuts, num_stages)
    written = frozenset().union(*(call.writes for survey in surveys for call in survey.calls))
    _unite(holders, twins, written)
    for other in others:
        order = Order(other.calls, woven=True, stages_of=placement.stages_of)
        try:
            cuts = cut_for(order, placement, seconds_per_byte)
        except SplitError:
            cuts = _cut(order, num_stages, seconds_per_byte, _loosened(order, placement, written))
        _hold(holders, other, order, cuts, num_stages)
    _unite(holders, twins, written)
    own = frozenset().union(*(survey.writes for survey in surveys))
    check_own_writes(own, placement)
    return Placement(num_stages, _complete(module, surveys, placement, own | twins.keys()))


def _complete(
    module: LightningModule, surveys: Sequence[Survey], placement: Placement, bound: frozenset[str]
) -> dict[str, frozenset[int]]:
    """Stages of everything, also of what no call uses.

    Args:
        module: The LightningModule.
        surveys: What its steps call.
        placement: Where what they use is.
        bound: Buffers that stay where they are although no call uses them.
    """
    holders, everywhere = placement.holders, frozenset(range(placement.num_stages))
    called = frozenset().union(*(r for s in surveys for call in s.calls for r in call.reads))
    called |= bound & holders.keys()
    buffers = {name for *_, name, t in state_items(module) if not isinstance(t, nn.Parameter)}
    complete: dict[str, frozenset[int]] = {}
    previous = frozenset({0})
    for name in dict.fromkeys(canonical_names(module).values()):
        if name in buffers - called:  # it is there for hooks, which run on every rank
            complete[name] = everywhere
            continue
        # What no call used goes with its predecessor, so that unused weights are saved and moved.
        previous = holders[name] if name in holders else frozenset({min(previous)})
        complete[name] = previous
    return complete


def check_own_writes(written: frozenset[str], placement: Placement) -> None:
    """Buffers that steps themselves write to live on the last stage alone.

    Raises:
        StepError: If one of them is on another stage.
    """
    for name in sorted(written):
        if elsewhere := placement.holders[name] - {placement.num_stages - 1}:
            raise StepError(
                f"A step itself writes to {name!r} on the last stage, and it was placed by another "
                f"step that needs it on stage {min(elsewhere)}, which would not see that. Use it "
                "behind the last call of a module in all steps; let the training come first, "
                "Trainer(num_sanity_val_steps=0), if only that writes to it; or write to it in a "
                "hook such as on_train_batch_end."
            )


def _unite(
    holders: dict[str, frozenset[int]], twins: dict[str, str], written: frozenset[str]
) -> None:
    """Lets an averaged copy and its original be on the same stages."""
    for copied, original in twins.items():
        if original not in holders or (copied in holders and {copied, original} & written):
            continue
        both = holders[original] | holders.get(copied, frozenset())
        holders[copied] = both
        if original not in written:
            holders[original] = both


def _hold(
    holders: dict[str, frozenset[int]],
    survey: Survey,
    order: Order,
    cuts: list[int],
    num_stages: int,
) -> None:
    """Adds the stages that one step needs its weights on to ``holders``."""
    bounds = [0, *cuts, len(order.units)]
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        for name in frozenset().union(*order.reads[begin:end]):
            holders[name] = holders.get(name, frozenset()) | {stage}
    last_call = [
        max((i for unit in order.units[a:b] for i, _ in unit), default=-1)
        for a, b in pairwise(bounds)
    ]
    for name, before in survey.used.items():
        reached = {s for s in range(num_stages) if last_call[s] >= before}
        holders[name] = holders.get(name, frozenset()) | {num_stages - 1} | reached


def cut_for(order: Order, placement: Placement, seconds_per_byte: float) -> list[int]:
    """Cuts an order such that every unit is on a stage that holds its weights.

    Raises:
        SplitError: If there is no such cut.
    """
    allowed = [placement.stages_of(reads) for reads in order.reads]
    for name, stages in zip(order.names(), allowed, strict=True):
        if stages is not None and not stages:
            raise SplitError(
                name,
                "it needs weights that another step placed on different stages",
                "Let all steps call the same modules, or name the stages with partition=[...].",
            )
    return _cut(order, placement.num_stages, seconds_per_byte, allowed)


def _cut(
    order: Order,
    num_stages: int,
    seconds_per_byte: float,
    allowed: list[frozenset[int] | None] | None = None,
) -> list[int]:
    return partition(
        order.cost,
        order.legal,
        order.bytes_at,
        num_stages,
        seconds_per_byte=seconds_per_byte,
        allowed=allowed,
    )


def _loosened(
    order: Order, placement: Placement, written: frozenset[str]
) -> list[frozenset[int] | None]:
    """Stages that each unit may be on, any for those that would have to go back.

    They get replicas of their weights there, but for running statistics, which have one home.
    """
    allowed: list[frozenset[int] | None] = []
    reached = 0
    for reads in order.reads:
        stages = placement.stages_of(reads)
        later = [stage for stage in stages or () if stage >= reached]
        if later:
            reached = min(later)
        elif not reads & written:
            stages = None
        allowed.append(stages)
    return allowed


def _first_cut(
    module: LightningModule,
    surveys: Sequence[Survey],
    num_stages: int,
    spec: PartitionSpec,
    seconds_per_byte: float,
    twins: dict[str, str],
) -> tuple[Order, list[int]]:
    calls = surveys[0].calls
    if spec != "auto":
        order = Order(calls, woven=True, twins=twins)
        names = order.names()
        if spec == "uniform":
            blocks = repeated_blocks(module)
            return order, partition_uniform(names, order.legal, num_stages, blocks)
        return order, cuts_at(names, list(spec), order.legal, num_stages)
    kinds: list[dict[str, Any]] = [{"woven": True}]
    if len(calls) > 1:
        kinds.append({"woven": False})
        if twins:
            kinds.insert(0, {"woven": True, "twins": twins})
    if before := _precedence(surveys[1:]):
        kinds.insert(0, {**kinds[0], "before": before})
    best: tuple[float, Order, list[int]] | None = None
    for kind in kinds:
        order = Order(calls, **kind)
        cuts = _cut(order, num_stages, seconds_per_byte)
        largest = max(stage_costs(order, cuts))
        if best is None or largest < _REPLICATE_BELOW * best[0]:
            best = (largest, order, cuts)
    assert best is not None
    return best[1], best[2]


def _precedence(others: Sequence[Survey]) -> list[Precedence]:
    """Which weights other steps use before which."""
    before = []
    for survey in others:
        reads = [frozenset().union(*call.reads) for call in survey.calls]
        for index, call in enumerate(survey.calls):
            for source in call.depends_on:
                if not reads[source] & reads[index]:
                    before.append((reads[source], reads[index]))
    return before


def stage_costs(order: Order, cuts: list[int]) -> list[float]:
    """Seconds of each stage."""
    bounds = [0, *cuts, len(order.units)]
    return [float(order.cost[a:b].sum()) for a, b in pairwise(bounds)]
