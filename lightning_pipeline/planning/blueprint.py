"""What each stage of a module does and keeps, for any number of stages: recorded once, then cut.

A training step is surveyed on stand-ins without memory, on its smallest and on its largest
microbatch. Amounts of work and memory are straight lines in the rows between these two, which holds
for all that is done row by row or to the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lightning_pipeline.batch import cut_batch, even_cut
from lightning_pipeline.errors import StepError
from lightning_pipeline.placing import SECONDS_PER_BYTE
from lightning_pipeline.splitting import CPU_RATES, Rates, state_items
from lightning_pipeline.splitting.cost import CostMode, Work
from lightning_pipeline.splitting.torch_private import (
    FakeTensorMode,
    disable_current_modes,
    pytree,
    storage_of,
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
from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.handmade import METHOD
from lightning_pipeline.steps.pending import TensorMeta

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Load:
    """What a stage does and keeps for one microbatch.

    Attributes:
        forward: Work of the forward.
        backward: Work of the whole backward.
        weight: Work of the part of the backward that makes gradients of weights.
        saved: Bytes that autograd saves and that came in, weights aside.
        deferred: Bytes that are kept from the first to the second half of a split backward.
        received: Bytes that come in.
        largest: Bytes that its largest piece saves: what a backward has in hand besides.
        own: Bytes of ``saved`` that the step's own code saves, which is never recomputed.
    """

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    weight: Work = field(default_factory=Work)
    saved: float = 0.0
    deferred: float = 0.0
    received: float = 0.0
    largest: float = 0.0
    own: float = 0.0

    def between(self, other: Load, share: float) -> Load:
        """The load that is ``share`` of the way to ``other``, beyond it above 1."""

        def mix(a: float, b: float) -> float:
            return max(0.0, a + share * (b - a))

        def mixed(a: Work, b: Work) -> Work:
            pairs = ((getattr(a, name), getattr(b, name)) for name in Work.__dataclass_fields__)
            return Work(*(mix(*pair) for pair in pairs))

        return Load(
            mixed(self.forward, other.forward),
            mixed(self.backward, other.backward),
            mixed(self.weight, other.weight),
            *(
                mix(getattr(self, name), getattr(other, name))
                for name in ("saved", "deferred", "received", "largest", "own")
            ),
        )


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
    ) -> None:
        if hasattr(module, METHOD):
            raise StepError(
                f"{type(module).__name__}.{METHOD} makes the stages by hand, for one number of "
                "them; what each number of stages would do is not known."
            )
        self._module, self._partition = module, partition
        self._optimizer_bytes = optimizer_bytes
        self._only, self._rest, self._context = only, rest, context
        analyst = _Planner(module, num_stages, rates, uncut)
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
        module, own = self._module, _OwnCode(self._module)
        analyst.seen = []
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.enable_grad(),
            patched([(module, "training_step", own), (module, "_device", _HOST)]),
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
        return _Recorded(found, analyst.seen[: len(found.calls)], own.load)

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
    ) -> None:
        super().__init__(root, num_stages, _HOST, uncut=uncut, rates=rates, counts_saved=True)
        self.seen: list[Analysis] = []

    def analyse(self, *args: Any) -> Any:
        """As an `Analyst`'s, on the host and not among the stand-ins of the step."""
        with disable_current_modes():
            self.seen.append(super().analyse(*args))
        return self.seen[-1]


class _OwnCode(CostMode):
    """The training step, of which is noted what its own code does and saves for the backward."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self._step, self._depth, self._saved = module.training_step, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; a survey may run it again."""
        self.work, self._depth = Work(), 0
        given = {storage_of(t) for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = self._step(*args, **kwargs)
        roots = [t.grad_fn for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        found = saved_in([root for root in roots if root is not None])
        # The batch is there anyway.
        self._saved = sum(size for storage, size in found.items() if storage not in given)
        return out

    @property
    def load(self) -> Load:
        """What its own code does and keeps; a gradient goes back through it once."""
        saved = self._saved
        return Load(self.work, self.work, saved=saved, largest=saved, own=saved)

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.work
        out = super().__torch_dispatch__(func, *args, **kwargs)
        if self._depth:
            self.work = before
        return out

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what runs in the block outside of modules with weights."""

        def begin(module: nn.Module, args: Any) -> None:
            self._depth += holds(module)

        def end(module: nn.Module, args: Any, out: Any) -> None:
            self._depth -= holds(module)

        @functools.cache
        def holds(module: nn.Module) -> bool:
            return next(state_items(module), None) is not None

        hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


def saved_in(roots: Sequence[Any]) -> dict[int, int]:
    """Bytes of each storage that a graph has saved.

    Args:
        roots: Nodes of autograd where the backward begins.
    """
    found: dict[int, int] = {}
    seen, todo = set(roots), list(roots)
    while todo:
        node = todo.pop()
        names = [name for name in dir(node) if name.startswith("_saved_")]
        kept = [getattr(node, name) for name in names]
        kept += list(getattr(node, "saved_tensors", ()))
        for tensor in pytree.tree_leaves(kept):
            if isinstance(tensor, Tensor):
                found[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


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
            parts.append(_part(call, recorded.analyses[index], low, high))
        loads.append(_sum(parts))
    return tuple(loads)


def _sum(loads: Sequence[Load]) -> Load:
    return Load(
        sum((load.forward for load in loads), Work()),
        sum((load.backward for load in loads), Work()),
        sum((load.weight for load in loads), Work()),
        sum(load.saved for load in loads),
        sum(load.deferred for load in loads),
        sum(load.received for load in loads),
        max(load.largest for load in loads),
        sum(load.own for load in loads),
    )


def _part(call: Call, seen: Analysis, low: int, high: int) -> Load:
    """What a stage does of one call, and what it keeps of it.

    What comes in is kept for the backward, too: values of a call that has begun, and what a call
    that is over has given.
    """
    if low == call.num_pieces:
        given = sum(out.nbytes for out in call.outputs if isinstance(out, TensorMeta))
        return Load(saved=given, received=given)
    program = seen.program
    if program is None:  # it could not be recorded: its seconds were guessed
        return Load() if low == high else _unknown(call)
    if not seen.cuttable:
        low, high = (0, program.num_pieces) if high > low else (0, 0)
    values = program.values
    came = program.live[low] if low else []
    # What comes from no other call is the batch, which is there anyway.
    batch = set() if call.depends_on else {values[value].storage for _, value in program.inputs}
    kept = {values[value].storage: values[value].nbytes for value in came}
    received, deferred, largest = sum(kept.values()), 0.0, 0.0
    for piece in range(low, high):
        node = program.nodes[program.pieces[piece]]
        saved = {s: size for s, size in node.saved.items() if s not in batch}
        kept.update(saved)
        own = sum(saved.values())
        largest = max(largest, own)
        if program.work[piece].weight != Work():
            # What went into its products, and the gradients of what came out.
            deferred += own + sum(values[value].nbytes for _, value in node.outputs)
    work = program.work[low:high]
    return Load(
        sum((piece.forward for piece in work), Work()),
        sum((piece.backward for piece in work), Work()),
        sum((piece.weight for piece in work), Work()),
        float(sum(kept.values())),
        deferred,
        float(received),
        largest,
    )


def _unknown(call: Call) -> Load:
    """A call in one piece of which only a guess of its time and its output are known."""
    third = Work(bytes=sum(call.cost) / 3 * CPU_RATES.bytes)
    kept = float(sum(out.nbytes for out in call.outputs if isinstance(out, TensorMeta)))
    return Load(third, third + third, third, kept, 2 * kept, 0.0, kept)
