"""Where the weights of a LightningModule live during a run, and how they get there and back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.batchnorm import names_of_norms
from lightning_pipeline.errors import StepError
from lightning_pipeline.gradients import GradientReducer
from lightning_pipeline.materialising import Deferred
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.names import cut_places, partition_names, stage_modules
from lightning_pipeline.observing import Candidate, Context, Example, Observer
from lightning_pipeline.options import Options
from lightning_pipeline.plan import Plan, make_plan
from lightning_pipeline.sharing import make_whole, share_state
from lightning_pipeline.splitting import (
    canonical_names,
    is_elsewhere,
    release,
    state_items,
)
from lightning_pipeline.splitting.settings import Same
from lightning_pipeline.steps import Placement, StepPlan, place, plan_step
from lightning_pipeline.steps.means import what_it_means
from lightning_pipeline.timing import time_pieces

# Sending a byte costs about as much as touching twenty in memory (PCIe 4 or 200 Gbit/s links
# against the device's memory); it only has to tell cheap cuts from dear ones.
SECONDS_PER_BYTE = 1 / 20e9


@dataclass(frozen=True)
class Held:
    """What this rank holds.

    Attributes:
        parameters: Parameters of each stage on this rank.
        buffers: Buffers of each stage on this rank.
        counted_here: Whether this rank counts a parameter in sums over the model, by identity; one
            that several ranks hold is counted by one of them.
        reducer: Completes the gradients.
    """

    parameters: dict[int, list[nn.Parameter]]
    buffers: dict[int, list[Tensor]]
    counted_here: dict[int, bool]
    reducer: GradientReducer

    def gradients(self) -> dict[int, bool]:
        """Identity of every gradient on this rank, and whether it is counted here."""
        lists = self.parameters.values()
        return {
            id(p.grad): self.counted_here[id(p)] for ps in lists for p in ps if p.grad is not None
        }


class PlacedModule:
    """A LightningModule whose weights are spread over stages by its first batch.

    Args:
        module: The user's LightningModule, all weights present.
        mesh: The rank's place, groups built.
        options: The user's choices.
        device: The rank's device.
        seed: Seed of random numbers drawn in surveys, and of weights that are made with the
            placement.

    Attributes:
        observer: Surveys its steps.
        placement: Where everything lives; ``None`` before the first batch.
        held: What this rank holds; ``None`` before the first batch.
        deferred: What the module's weights are made from, if it was built without and has not been
            placed.
        began_without_weights: Whether it was built without.
        is_provisional: Whether it was placed without its training step, which could not run on the
            batch of the validation that came first.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        options: Options,
        device: torch.device,
        seed: int,
    ) -> None:
        self._module, self._mesh, self._options = module, mesh, options
        self._device, self._written = device, list[str]()
        self._means: dict[str, str] = {}
        self._seed = seed
        self.observer = self._make_observer()
        self.placement: Placement | None = None
        self.held: Held | None = None
        self.deferred: Deferred | None = None
        self.began_without_weights = self.is_provisional = False
        self._known: dict[str, Same] = {}

    def _make_observer(self) -> Observer:
        options = self._options
        return Observer(
            self._module,
            self._mesh,
            options.module,
            self._device,
            self._seed,
            options.uncut,
            options.balance_by == "time",
        )

    def reschedule(self, options: Options) -> None:
        """Takes other options before anything is placed."""
        assert self.placement is None
        self._options, self.observer = options, self._make_observer()

    def defer(self, deferred: Deferred | None) -> None:
        """Lets the module's weights come with its placement, if there is anything ``deferred``."""
        self.deferred = deferred
        self.began_without_weights |= deferred is not None

    def place(self, candidates: list[Candidate], on_placed: Callable[[StepPlan], None]) -> None:
        """Surveys the steps on the first batch and leaves this rank with its stages' weights.

        Args:
            candidates: The steps of the run, the best to place by first.
            on_placed: Called with the plan of the step that the model was placed by.
        """
        with torch.inference_mode(False), torch.enable_grad():
            surveys = self.observer.observe_all(candidates)
            if self._options.balance_by == "time":
                for candidate in candidates:
                    if candidate.step in surveys:
                        found = surveys[candidate.step]
                        time_pieces(found, candidate.context, self._mesh, self._device)
            placement = place(
                self._module,
                list(surveys.values()),
                self._mesh.num_stages,
                spec=self._options.partition,
                seconds_per_byte=SECONDS_PER_BYTE,
            )
            box = [placement]
            dist.broadcast_object_list(box, 0)  # replicas may have seen other shapes
            self.placement, self.is_provisional = box[0], candidates[0].step not in surveys
            step, found = next(iter(surveys.items()))
            examples = {candidate.step: candidate.example for candidate in candidates}
            means = {
                name: what_it_means(seen.losses, examples[name].batch, examples[name].rows)
                for name, seen in surveys.items()
            }
            self._means = {name: text for name, text in means.items() if text is not None}
            self._written = sorted(found.writes)
            on_placed(plan_step(step, found, self.placement, seconds_per_byte=SECONDS_PER_BYTE))
            del surveys, found
            self.held = self._release(self.placement)

    def plan(self, step: str, example: Example, context: Context) -> StepPlan:
        """Plans one signature of a step of the placed module.

        Raises:
            StepError: If a parameter has come or been replaced since it was placed.
        """
        assert self.placement is not None
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if name not in self._known or self._known[name] != Same(parameter):
                raise StepError(
                    f"self.{name} is not the parameter that was placed: no rank knows where it "
                    "lives. Replace modules and parameters before the fit, in __init__ or "
                    "configure_model, or write into the old one with `copy_`."
                )
        found = self.observer.observe(step, example, context, self._mesh.sizes.pipeline > 1)
        return plan_step(step, found, self.placement, seconds_per_byte=SECONDS_PER_BYTE)

    def _release(self, placement: Placement) -> Held:
        """Lets go of the weights of other ranks and moves the own ones to the device."""
        here = set(self._mesh.stages)
        canonical = canonical_names(self._module)
        holders = {name: tuple(sorted(stages)) for name, stages in placement.holders.items()}

        def keep(name: str) -> bool:
            return bool(here & set(holders[name]))

        release(self._module, keep, holders)
        gc.collect()  # dead graphs of the survey still have the memory of what is released
        made = self.deferred is not None
        if self.deferred is not None:
            self.deferred.fill(keep, holders, self._device, self._seed)
            self.deferred = None
        self._module.to(self._device)  # metrics too; a placeholder stays what it is
        parameters: dict[int, list[nn.Parameter]] = {stage: [] for stage in self._mesh.stages}
        buffers: dict[int, list[Tensor]] = {stage: [] for stage in self._mesh.stages}
        stages_of: dict[int, frozenset[int]] = {}
        for _, _, _, name, tensor in state_items(self._module):
            if canonical[name] != name or is_elsewhere(tensor):
                continue
            stages_of[id(tensor)] = placement.holders[name]
            for stage in placement.holders[name] & here:
                if isinstance(tensor, nn.Parameter):
                    parameters[stage].append(tensor)
                else:
                    buffers[stage].append(tensor)
        sets = sorted({s for s in placement.holders.values() if len(s) > 1}, key=sorted)
        groups = dict(zip(sets, self._mesh.build_holder_groups(sets), strict=True))
        if made:  # sources of random numbers without a seed differ
            self._agree(groups)
        rank = self._mesh.global_rank
        counted = {
            key: self._mesh.holder_ranks(stages)[0] == rank for key, stages in stages_of.items()
        }
        shared = [
            (
                groups[stages],
                [
                    tensor
                    for _, _, _, name, tensor in state_items(self._module)
                    if placement.holders.get(name) == stages
                    and isinstance(tensor, nn.Parameter)
                    and not is_elsewhere(tensor)
                ],
            )
            for stages in sets
        ]
        named = self._module.named_parameters(remove_duplicate=False)
        self._known = {name: Same(parameter) for name, parameter in named}
        reducer = GradientReducer(self._mesh, parameters, shared)
        return Held(parameters, buffers, counted, reducer)

    def _agree(self, groups: Mapping[frozenset[int], dist.ProcessGroup | None]) -> None:
        """Gives all holders of a tensor, in all replicas, the value of the first one."""
        assert self.placement is not None
        canonical = canonical_names(self._module)
        for *_, name, tensor in state_items(self._module):
            stages = self.placement.holders[canonical[name]]
            group = groups.get(stages)
            if canonical[name] == name and not is_elsewhere(tensor) and group is not None:
                value = tensor.data.contiguous()
                dist.broadcast(value, self._mesh.holder_ranks(stages)[0], group)
                tensor.data.copy_(value)
        if self._mesh.sizes.data > 1:
            share_state(self._module, self._mesh, self._device)

    def go_on(self) -> None:
        """Moves what this rank still holds from an earlier run to the device again."""
        if self.placement is not None:
            self.held = self._release(self.placement)

    @property
    def writes(self) -> bool:
        """Whether its steps write to buffers behind their last call of a module."""
        return bool(self._written)

    def put_back(self) -> None:
        """Makes the module whole again on every rank, from the ranks that hold its parts."""
        if self.placement is None:
            return
        make_whole(self._module, self.placement.holders, self._mesh, self._device)
        self.placement = self.held = None

    def describe(self, plan: StepPlan, num_microbatches: int) -> Plan:
        """What the run will do: who holds what, its cost and the predicted bubble."""
        assert self.placement is not None
        num_stages = self._mesh.num_stages
        counts = [[0, 0] for _ in range(num_stages)]
        for _, _, _, name, tensor in state_items(self._module):
            for stage in self.placement.holders.get(name, ()):
                counts[stage][0] += tensor.numel() * isinstance(tensor, nn.Parameter)
                counts[stage][1] += tensor.numel() * tensor.element_size()
        empty = [stage for stage, names in enumerate(plan.stage_names) if not names]
        # Several calls have an order of their own wherever their weights are placed otherwise.
        is_one_call = len(plan.calls) == 1 and plan.by_hand is None
        notes = [*self._options.notes, *self._notes(plan.step, num_microbatches)]
        notes += _kept_whole(plan)
        if empty:
            notes.append(
                f"stages {', '.join(map(str, empty))} are empty and only pass on what they get: "
                f"the model has fewer pieces than the {num_stages} stages"
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
            partition_names(plan.stage_names) if is_one_call else None,
            cut_places(plan.stage_names),
        )

    def _notes(self, step: str, num_microbatches: int) -> list[str]:
        """What makes a step on microbatches another one than on the whole batch."""
        notes: list[str] = []
        if step != "training_step" or num_microbatches == 1:
            return notes
        norms = names_of_norms(self._module)
        if norms:
            deferred = "; its running statistics are those of whole batches of what it gets"
            notes.append(
                f"{norms[0]} ({len(norms)} such in all) normalises each microbatch by itself, as "
                "with accumulate_grad_batches; weights will differ from those of whole batches"
                + (deferred if self._options.deferred_batch_norm else "")
            )
        if self._written:
            notes.append(
                f"training_step writes to {self._written[0]} ({len(self._written)} such in all) "
                "once a microbatch, one after the other, as with accumulate_grad_batches"
            )
        for text in dict.fromkeys(self._means.values()):
            steps = " and ".join(name for name, what in self._means.items() if what == text)
            notes.append(
                f"the loss of {steps} {text}, for the mean over the whole batch; in evaluation "
                "steps as well"
            )
        splits = self._options.schedule.splits_backward
        again, compiles = self._options.activation_checkpointing, self._options.compile is not None
        if splits and (again != "none" or compiles):
            which = "compiled" if compiles else "recomputed"
            notes.append(
                f"{which} stages run their whole backward at once, in the place of its first half: "
                f"the bubble of {self._options.schedule.name} is larger than predicted"
            )
        return notes


def _kept_whole(plan: StepPlan) -> list[str]:
    """Notes on modules in one piece that are dearer than one and a half equal stages."""
    limit = 1.5 / plan.num_stages * sum(plan.stage_cost)
    notes = []
    for call in plan.calls:
        costs: dict[str, float] = {}
        if call.program is None:
            reasons = {"": str(call.reason)} if call.reason is not None else {}
            costs[""] = sum(call.cost)
        else:
            reasons = call.program.kept_whole
            for name, cost in zip(call.program.piece_names, call.cost, strict=True):
                costs[name] = costs.get(name, 0.0) + cost
        for name, reason in reasons.items():
            if costs.get(name, 0.0) > limit:
                whole = ".".join(part for part in (call.name, name) if part) or "the forward"
                share = 100 * costs[name] / sum(plan.stage_cost)
                notes.append(f"{whole} stays whole, with {share:.0f} % of the cost: {reason}")
    return notes


def share(buffers: dict[int, list[Tensor]], source: int, group: dist.ProcessGroup) -> None:
    """Broadcasts the buffers of all stages from global rank ``source``, a message a dtype."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in {id(b): b for stage in buffers.values() for b in stage}.values():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for same in kinds.values():
        message = torch.cat([buffer.detach().reshape(-1) for buffer in same])
        dist.broadcast(message, source, group)
        parts = message.split([buffer.numel() for buffer in same])
        for buffer, part in zip(same, parts, strict=True):
            buffer.data.copy_(part.view_as(buffer))
