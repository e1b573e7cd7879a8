"""What each stage of a module does and keeps, for any number of stages: recorded once, then cut.

A training step is surveyed on stand-ins without memory, on its smallest and on its largest
microbatch. Amounts of work and memory are straight lines in the rows between these two, which holds
for all that is done row by row or to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.batch import cut_batch, even_cut
from lightning_pipeline.errors import StepError
from lightning_pipeline.lightning_private import MODULE_DEVICE
from lightning_pipeline.placing import SECONDS_PER_BYTE
from lightning_pipeline.planning.loads import Load, added, part_of
from lightning_pipeline.planning.measuring import measure_work
from lightning_pipeline.planning.own_code import OwnCode
from lightning_pipeline.splitting import Rates, state_items
from lightning_pipeline.splitting.torch_private import (
    FakeTensorMode,
    disable_current_modes,
)
from lightning_pipeline.steps import (
    Analyst,
    PartitionSpec,
    Request,
    StepPlan,
    Survey,
    patched,
    place,
    plan_step,
    survey,
)
from lightning_pipeline.steps.analyst import Analysis
from lightning_pipeline.steps.handmade import METHOD

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class State:
    """What a stage holds all the time, in bytes.

    Attributes:
        parameters: Number of parameters.
        weights: Bytes of parameters and buffers.
        gradients: Bytes of gradients.
        optimizer: Bytes of the optimizer's state.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Drawing:
    """A module cut into a number of stages.

    Attributes:
        plan: The cut of its training step.
        states: What each stage holds.
        small: What each stage does for the smallest microbatch.
        large: The same for the largest.
        rows: Rows of both.
    """

    plan: StepPlan
    states: tuple[State, ...]
    small: tuple[Load, ...]
    large: tuple[Load, ...]
    rows: tuple[int, int]

    def loads(self, rows: float) -> list[Load]:
        """What each stage does for a microbatch of so many rows."""
        low, high = self.rows
        if low == high:
            # One size was seen: all is taken to grow with the rows.
            return [Load().between(load, rows / low) for load in self.large]
        share = (rows - low) / (high - low)
        return [a.between(b, share) for a, b in zip(self.small, self.large, strict=True)]


@dataclass(frozen=True)
class _Recorded:
    """One size of a microbatch.

    Attributes:
        survey: What the step calls.
        analyses: What is known of each call.
        own: What the step's own code does behind its calls, on the last stage.
    """

    survey: Survey
    analyses: list[Analysis]
    own: Load


class Blueprint:
    """The recordings of a training step, and their cuts.

    Args:
        module: The user's LightningModule; its weights may be placeholders or without memory.
        batch: A batch for its training step, on the host.
        rows: Rows of the batch.
        counts: Fewest and most microbatches that are of interest.
        num_stages: The most stages of interest.
        rates: The rates that a training would cut by.
        optimizer_bytes: Bytes of the optimizer's state of each parameter, by name.
        rest: Further arguments of the step.
        context: The precision plugin's context of the step.
        partition: How the module is cut.
        only: Dotted name of the module to cut; ``None``: found by itself.
        uncut: Classes of modules that stay in one piece.
        measured_on: Device on which the pieces are run, so that their times are measured instead
            of worked out; ``None``: none.

    Raises:
        StepError: If the step cannot be followed without values, or stages are made by hand.
        SplitError: If the module cannot be recorded.
    """

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        rows: int,
        counts: tuple[int, int],
        num_stages: int,
        rates: Rates,
        optimizer_bytes: Mapping[str, int],
        *,
        rest: tuple[Any, ...] = (0,),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        partition: PartitionSpec = "auto",
        only: str | None = None,
        uncut: tuple[type[nn.Module], ...] = (),
        measured_on: torch.device | None = None,
    ) -> None:
        if hasattr(module, METHOD):
            raise StepError(
                f"{type(module).__name__}.{METHOD} makes the stages by hand, for one number of "
                "them; what each number of stages would do is not known."
            )
        self._module, self._partition = module, partition
        self._optimizer_bytes = optimizer_bytes
        self._only, self._rest, self._context = only, rest, context
        self._measured_on, self._rates = measured_on, rates
        analyst = _Planner(module, num_stages, rates, uncut, measured_on is not None)
        sizes = sorted({max(1, rows // most) for most in counts})
        recorded = [self._record(analyst, batch, rows, size) for size in sizes]
        self._small, self._large = recorded[0], recorded[-1]
        self._sizes = sizes[0], sizes[-1]
        if _pieces(self._small.survey) != _pieces(self._large.survey):
            self._small, self._sizes = self._large, (sizes[-1], sizes[-1])
        self._drawings: dict[int, Drawing] = {}

    @property
    def num_pieces(self) -> int:
        """Number of pieces that stages can be made of."""
        return sum(call.num_pieces for call in self._large.survey.calls)

    def cut(self, num_stages: int) -> Drawing:
        """The module in so many stages."""
        if num_stages not in self._drawings:
            self._drawings[num_stages] = self._cut(num_stages)
        return self._drawings[num_stages]

    def _record(self, analyst: _Planner, batch: Any, rows: int, size: int) -> _Recorded:
        many = max(1, rows // size)
        microbatch = cut_batch(batch, even_cut(rows, many, many))[0]
        module, own = self._module, OwnCode(self._module)
        analyst.seen = []
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.enable_grad(),
            patched([(module, "training_step", own), (module, MODULE_DEVICE, _HOST)]),
            own.counted(),
        ):
            found = survey(
                Request(
                    module,
                    "training_step",
                    microbatch,
                    self._rest,
                    analyst,
                    self._context,
                    _HOST,
                    0,
                    made_up=True,
                    only=self._only,
                )
            )
        if found.error is not None:
            raise StepError(
                f"training_step cannot be followed without values: {found.error}. Plan without "
                "code that reads values of tensors behind the call of the model, e.g. loss.item()."
            ) from found.error
        seen, load = analyst.seen[: len(found.calls)], own.load
        if self._measured_on is not None:
            device, rates = self._measured_on, self._rates
            load = measure_work(found, seen, load, self._context, device, rates)
        return _Recorded(found, seen, load)

    def _cut(self, num_stages: int) -> Drawing:
        seen = self._large.survey
        price = {"seconds_per_byte": SECONDS_PER_BYTE}
        placement = place(self._module, [seen], num_stages, spec=self._partition, **price)
        plan = plan_step("training_step", seen, placement, **price)
        loads = [_loads(plan, recorded) for recorded in (self._small, self._large)]
        holders = placement.holders
        return Drawing(plan, self._states(num_stages, holders), loads[0], loads[1], self._sizes)

    def _states(self, num_stages: int, holders: Mapping[str, frozenset[int]]) -> tuple[State, ...]:
        sums = [[0, 0, 0, 0] for _ in range(num_stages)]
        for *_, name, tensor in state_items(self._module):
            for stage in holders.get(name, ()):
                size = tensor.numel() * tensor.element_size()
                sums[stage][0] += tensor.numel() * isinstance(tensor, nn.Parameter)
                sums[stage][1] += size
                sums[stage][2] += size * tensor.requires_grad
                sums[stage][3] += self._optimizer_bytes.get(name, 0)
        return tuple(State(*counts) for counts in sums)


class _Planner(Analyst):
    """Records calls beside the modes under which the step's own code runs.

    Attributes:
        seen: What is known of each call, in order.
    """

    def __init__(
        self,
        root: nn.Module,
        num_stages: int,
        rates: Rates,
        uncut: tuple[type[nn.Module], ...],
        is_timed: bool,
    ) -> None:
        super().__init__(
            root,
            num_stages,
            _HOST,
            uncut=uncut,
            rates=rates,
            counts_saved=True,
            is_timed=is_timed,
        )
        self.seen: list[Analysis] = []

    def analyse(self, *args: Any) -> Any:
        """As an `Analyst`'s, on the host and not among the stand-ins of the step."""
        with disable_current_modes():
            self.seen.append(super().analyse(*args))
        return self.seen[-1]


def _pieces(found: Survey) -> list[tuple[str, int]]:
    return [(call.name, call.num_pieces) for call in found.calls]


def _loads(plan: StepPlan, recorded: _Recorded) -> tuple[Load, ...]:
    """What each stage of a cut does for the microbatches of one size."""
    loads = []
    for stage in range(plan.num_stages):
        own = recorded.own if stage == plan.num_stages - 1 else Load()
        parts = [own]
        for index, call in enumerate(recorded.survey.calls):
            low, high = plan.cuts[index][stage : stage + 2]
            parts.append(part_of(call, recorded.analyses[index], low, high))
        loads.append(added(parts))
    return tuple(loads)
