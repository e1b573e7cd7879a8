"""A LightningModule placed on stages: its steps planned, run and put back together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lightning_pipeline.batch import Cut, checksum, cut_batch, even_cut, num_rows
from lightning_pipeline.engine import Engine
from lightning_pipeline.errors import StepError
from lightning_pipeline.gradients import GradientReducer
from lightning_pipeline.logs import LogExchange, LogRecorder
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.metrics import SharedCompute, StepMetrics
from lightning_pipeline.passes import StepPass
from lightning_pipeline.plan import Plan, make_plan, stage_modules
from lightning_pipeline.schedules import Auto, Schedule
from lightning_pipeline.splitting import (
    canonical_names,
    is_elsewhere,
    release,
    restore,
    state_items,
)
from lightning_pipeline.steps import (
    Analyst,
    Microbatch,
    PartitionSpec,
    Placement,
    Runner,
    StepPlan,
    Survey,
    mix,
    place,
    plan_step,
    survey,
)
from lightning_pipeline.steps.survey import patched

Context = Callable[[], AbstractContextManager[Any]]

# Sending a byte costs about as much as touching twenty in memory (PCIe 4 or 200 Gbit/s links
# against the device's memory); it only has to tell cheap cuts from dear ones.
_SECONDS_PER_BYTE = 1 / 20e9


@dataclass(frozen=True)
class Options:
    """The user's choices that do not depend on the model.

    Attributes:
        schedule: The training schedule.
        stages_per_rank: Stages that each rank holds.
        num_microbatches: Most microbatches of a batch, or ``"auto"``.
        partition: How the model is cut.
        module: Dotted name of the pipelined module, or ``None``.
    """

    schedule: Schedule
    stages_per_rank: int
    num_microbatches: int | Auto
    partition: PartitionSpec
    module: str | None


class Pipeline:
    """One LightningModule over the stages of one run.

    Args:
        module: The user's LightningModule, all weights present.
        mesh: The rank's place, groups built.
        options: The user's choices.
        device: The rank's device.
        seed: Seed of all random numbers inside steps, equal on every rank.
        context: Precision context of each step method, by its name.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        options: Options,
        device: torch.device,
        seed: int,
        context: Mapping[str, Context],
    ) -> None:
        self._module, self._mesh, self._options = module, mesh, options
        self._device, self._seed, self._context = device, seed, context
        self._num_stages = mesh.sizes.pipeline * options.stages_per_rank
        self._engine = Engine(mesh, options.schedule, options.stages_per_rank, device)
        self._analyst = Analyst(module, self._num_stages, device)
        self._exchange = LogExchange(module, mesh, device)
        self._computed = SharedCompute(module, mesh)
        self._plans: dict[Hashable, StepPlan] = {}
        self._runners: dict[str, dict[int, Runner]] = {}
        self._counters: dict[str, int] = {}
        self._held: dict[int, list[nn.Parameter]] = {}
        self._buffers: dict[int, list[Tensor]] = {}
        self.placement: Placement | None = None
        self.reducer: GradientReducer | None = None
        self.counted_here: dict[int, bool] = {}

    # placing

    def place(
        self, step: str, args: tuple[Any, ...], on_placed: Callable[[StepPlan, int], None]
    ) -> None:
        """Surveys the step on its first batch and leaves this rank with its stages' weights.

        Args:
            step: The step to place the model by; another one of the run is about to run first if
                it fails on these arguments.
            args: Arguments of the step that runs now.
            on_placed: Called with the plan of the placing step and its number of microbatches.
        """
        with torch.inference_mode(False), torch.enable_grad():
            cut = self._cut(args[0], step)
            microbatch = cut_batch(args[0], cut)[0]
            found = self._survey_for_placement(step, microbatch, args[1:])
            placement = place(
                self._module,
                found,
                self._num_stages,
                spec=self._options.partition,
                seconds_per_byte=_SECONDS_PER_BYTE,
            )
            box = [placement]
            dist.broadcast_object_list(box, 0)  # replicas may have seen other shapes
            self.placement = box[0]
            plan = plan_step(step, found, self.placement, seconds_per_byte=_SECONDS_PER_BYTE)
            on_placed(plan, cut.total)
            del found
            gc.collect()  # graphs of the survey that still refer to weights would pin them
            self._release(self.placement)

    def _survey_for_placement(self, step: str, microbatch: Any, rest: tuple[Any, ...]) -> Survey:
        """Surveys in training mode where the weights are: on the host, before they are placed."""
        modes = [(child, child.training) for child in self._module.modules()]
        host = next((t.device for *_, t in state_items(self._module)), self._device)
        analyst = self._analyst
        if host != self._device:
            analyst = Analyst(self._module, self._num_stages, host, analyst.leaves)
        try:
            if step == "training_step":
                self._module.train()
            with patched([(self._module, "_device", host)]):
                return survey(
                    self._module,
                    step,
                    move_data_to_device(microbatch, host),
                    rest,
                    analyst=analyst,
                    context=self._context[step],
                    device=host,
                    seed=self._seed,
                    only=self._options.module,
                )
        finally:
            for child, training in modes:
                child.training = training

    def _release(self, placement: Placement) -> None:
        """Lets go of the weights of other ranks and moves the own ones to the device."""
        here = set(self._mesh.stages)
        canonical = canonical_names(self._module)
        holders = {name: tuple(sorted(stages)) for name, stages in placement.holders.items()}
        release(self._module, lambda name: bool(here & set(holders[name])), holders)
        for tensor in {id(t): t for *_, t in state_items(self._module)}.values():
            if not is_elsewhere(tensor):
                tensor.data = tensor.data.to(self._device)
        self._collect(placement, canonical)

    def _collect(self, placement: Placement, canonical: dict[str, str]) -> None:
        """Lists what each stage of this rank holds and who shares it."""
        self._held = {stage: [] for stage in self._mesh.stages}
        self._buffers = {stage: [] for stage in self._mesh.stages}
        holders: dict[int, frozenset[int]] = {}
        for _, _, _, name, tensor in state_items(self._module):
            if canonical[name] != name or is_elsewhere(tensor):
                continue
            stages = holders[id(tensor)] = placement.holders[name]
            lists = self._held if isinstance(tensor, nn.Parameter) else self._buffers
            for stage in stages & set(self._mesh.stages):
                lists[stage].append(tensor)  # type: ignore[arg-type]
        sets = sorted({s for s in placement.holders.values() if len(s) > 1}, key=sorted)
        groups = dict(zip(sets, self._mesh.build_holder_groups(sets), strict=True))
        self.reducer = GradientReducer(self._mesh, self._held, holders, groups)
        rank = self._mesh.global_rank
        self.counted_here = {
            key: self._mesh.holder_ranks(stages)[0] == rank for key, stages in holders.items()
        }

    def abandon(self) -> None:
        """Takes off what was put on the module, without talking to other ranks."""
        self._computed.remove()
        self._engine.clear()

    def put_back(self) -> None:
        """Makes the module whole again on every rank, from the ranks that hold its parts."""
        self._computed.remove()
        if self.placement is None:
            return
        self._engine.clear()
        canonical = canonical_names(self._module)
        with torch.inference_mode(False), torch.no_grad():
            for _, _, _, name, tensor in list(state_items(self._module)):
                if canonical[name] != name:
                    continue
                owner = self._mesh.holder_ranks(self.placement.holders[name])[0]
                self._fetch(tensor, owner)
        self.placement, self._plans = None, {}

    def _fetch(self, tensor: Tensor, owner: int) -> None:
        elsewhere = is_elsewhere(tensor)
        shape, dtype = tuple(tensor.shape), tensor.dtype
        value = torch.empty(shape, dtype=dtype, device=self._device) if elsewhere else tensor.data
        value = value.contiguous()
        dist.broadcast(value, owner, self._mesh.pipeline_group)
        if elsewhere:
            restore(tensor, value)
        else:
            tensor.data = value

    def describe(self, plan: StepPlan, num_microbatches: int) -> Plan:
        """What the run will do: who holds what, its cost and the predicted bubble."""
        assert self.placement is not None
        counts = [[0, 0] for _ in range(self._num_stages)]
        for _, _, _, name, tensor in state_items(self._module):
            for stage in self.placement.holders.get(name, ()):
                counts[stage][0] += tensor.numel() * isinstance(tensor, nn.Parameter)
                counts[stage][1] += tensor.numel() * tensor.element_size()
        notes = []
        empty = [stage for stage, names in enumerate(plan.stage_names) if not names]
        if empty:
            notes.append(
                f"stages {', '.join(map(str, empty))} are empty: the model has fewer pieces than "
                f"the {self._num_stages} stages"
            )
        return make_plan(
            self._options.schedule,
            self._mesh.sizes,
            num_microbatches,
            plan.stage_cost,
            stage_modules(plan.stage_names),
            [count for count, _ in counts],
            [size for _, size in counts],
            self._options.stages_per_rank,
            notes,
        )

    # running

    def run(
        self,
        step: str,
        args: tuple[Any, ...],
        *,
        trains: bool,
        scale: float | Tensor = 1.0,
        count: int | None = None,
    ) -> tuple[Tensor, Any]:
        """Runs one step over the pipeline and replays its logs.

        Args:
            step: Name of the step method.
            args: Its arguments, the batch first.
            trains: Whether to run the backward.
            scale: Factor of the loss in the backward.
            count: Number of this batch in the run, for its random numbers; ``None`` counts here.

        Returns:
            The loss over the batch, float64 of shape [], equal on all ranks of the pipeline; and
            what the step returned for the whole batch, on the last stage, ``None`` elsewhere.
        """
        work = self._prepare(step, args, trains, scale, count)
        self._computed.inside_step = True
        try:
            self._engine.run(work)
            work.metrics.finish()
        finally:
            self._computed.inside_step = False
        self._computed.forget()
        recorder = work.recorder if self._mesh.is_last else None
        loss = self._exchange(step, recorder, checksum(args[0]), work.loss())
        self._check_fingerprints(step)
        return loss, work.output()

    def _prepare(
        self,
        step: str,
        args: tuple[Any, ...],
        trains: bool,
        scale: float | Tensor,
        count: int | None,
    ) -> StepPass:
        assert self.reducer is not None
        batch, rest = args[0], args[1:]
        cut = self._cut(batch, step)
        number = self._counters[step] = self._counters.get(step, 0) + 1
        seed = mix(self._seed, *step.encode(), number if count is None else count)
        metrics = StepMetrics(self._module)
        recorder = LogRecorder(self._module, metrics)
        microbatches, mode = [], self._mode()
        for index, microbatch in enumerate(cut_batch(batch, cut)):
            plan = self._plan(step, microbatch, rest, mode)
            log = None if cut.is_filler(index) else recorder
            own_seed = mix(seed, self._mesh.data_rank, index)
            microbatches.append(Microbatch(microbatch, rest, plan, own_seed, log))
        return StepPass(
            microbatches,
            cut,
            trains,
            scale,
            self._runners_of(step),
            self._held,
            self._buffers,
            self.reducer,
            recorder,
            metrics,
        )

    def _runners_of(self, step: str) -> dict[int, Runner]:
        if step not in self._runners:
            self._runners[step] = {
                stage: Runner(self._module, stage, self._context[step], self._device)
                for stage in self._mesh.stages
            }
        return self._runners[step]

    def _check_fingerprints(self, step: str) -> None:
        for runner in self._runners[step].values():
            flags, runner.mismatches = runner.mismatches, []
            if flags and bool(torch.stack([flag.to(self._device) for _, flag in flags]).any()):
                call = next(name for name, flag in flags if bool(flag))
                raise StepError(
                    f"{step}: the arguments of {call} on stage {runner.stage} differ from those on "
                    "the stage before: what the step computes from them is not the same on every "
                    "rank. Usual causes: an attribute that only the end of the step changes, or a "
                    "random source that seed_everything does not know."
                )

    def _cut(self, batch: Any, step: str) -> Cut:
        rows = num_rows(batch, step)
        # BatchNorm refuses to normalise a single row in training.
        norms = (m for m in self._module.modules() if isinstance(m, _BatchNorm))
        min_rows = 2 if any(m.training for m in norms) and rows > 1 else 1
        real, total = self._options.schedule.choose_microbatches(
            rows,
            self._options.num_microbatches,
            self._mesh.sizes.pipeline,
            self._options.stages_per_rank,
            min_rows,
        )
        return even_cut(rows, real, total)

    def _mode(self) -> Hashable:
        """What a plan depends on besides shapes; equal on all ranks."""
        return (
            tuple(child.training for child in self._module.modules()),
            tuple(parameter.requires_grad for parameter in self._module.parameters()),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    def _plan(self, step: str, microbatch: Any, rest: tuple[Any, ...], mode: Hashable) -> StepPlan:
        assert self.placement is not None
        key = (step, _batch_signature(microbatch), mode)
        if key not in self._plans:
            found = self._survey(step, microbatch, rest)
            self._plans[key] = plan_step(
                step, found, self.placement, seconds_per_byte=_SECONDS_PER_BYTE
            )
        return self._plans[key]

    def _survey(self, step: str, microbatch: Any, rest: tuple[Any, ...]) -> Survey:
        return survey(
            self._module,
            step,
            microbatch,
            rest,
            analyst=self._analyst,
            context=self._context[step],
            device=self._device,
            seed=self._seed,
            only=self._options.module,
        )


def _batch_signature(batch: Any) -> Hashable:
    """Shapes and structure of a microbatch; plain values may differ from batch to batch."""
    leaves, spec = pytree.tree_flatten(batch)
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves
    )
