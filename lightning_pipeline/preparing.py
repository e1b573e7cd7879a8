"""What a batch needs before the stages can run it: microbatches, plans, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.batch import Cut, signature
from lightning_pipeline.batchnorm import names_of_norms, normalises_batches
from lightning_pipeline.loaders import choose_cut, cut_together, loader_levels
from lightning_pipeline.logs import LogRecorder
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.metrics import StepMetrics
from lightning_pipeline.observing import Context, Example
from lightning_pipeline.options import Options
from lightning_pipeline.passes import StepPass
from lightning_pipeline.placing import PlacedModule
from lightning_pipeline.plans import Plans
from lightning_pipeline.steps import (
    ABSENT,
    Microbatch,
    Runner,
    StepPlan,
    compiled,
    mix,
    modes_of,
    patched,
    recomputed_blocks,
)


class Preparer:
    """Makes passes of batches.

    Args:
        module: The user's LightningModule.
        placed: Where its weights live.
        mesh: The rank's place.
        options: The user's choices.
        device: The rank's device.
        seed: Seed of all random numbers inside steps, equal on every rank.
        contexts: Precision context of each step method, by its name.

    Attributes:
        plans: The plans of all steps.
    """

    def __init__(
        self,
        module: LightningModule,
        placed: PlacedModule,
        mesh: Mesh,
        options: Options,
        device: torch.device,
        seed: int,
        contexts: Mapping[str, Context],
    ) -> None:
        self._module, self._placed = module, placed
        self._mesh, self._device = mesh, device
        self._seed, self._contexts = seed, contexts
        self._counters: dict[str, int] = {}
        self._sizes: dict[str, Any] = {}
        self.start_anew(options)

    def start_anew(self, options: Options) -> None:
        """Forgets the stages, which are going to be others.

        Args:
            options: The user's choices from now on.
        """
        self._options, self.plans = options, Plans(self._module)
        self._runners: dict[str, dict[int, Runner]] = {}
        self._repeated: list[tuple[object, str, Any]] | None = None

    def prepare(
        self,
        step: str,
        args: tuple[Any, ...],
        trains: bool,
        scale: float | Tensor,
        accumulated: int,
        count: int | None,
    ) -> StepPass:
        """A batch as the engine runs it; the arguments are those of `Pipeline.run`."""
        held = self._placed.held
        assert held is not None, "no batch has been seen yet"
        batch, rest = args[0], args[1:]
        cut = self.cut(batch, step)
        number = self._counters[step] = self._counters.get(step, 0) + 1
        seed = mix(self._seed, *step.encode(), number if count is None else count)
        metrics = StepMetrics(self._module, cut.all_sizes)
        counts = self._placed.observer.counts.setdefault(step, set())
        recorder = LogRecorder(self._module, metrics, self._sizes.setdefault(step, {}), counts)
        batches = self.microbatches(batch, cut, step)
        mode = self._mode()
        plans = self._plans_of(step, batch, batches, cut, rest, mode)
        carries = self._placed.observer.carries
        wholes = carries.wholes(frozenset().union(*(plan.reads for plan in plans)))
        starts = carries.starts(wholes, cut.sizes)
        microbatches = [
            Microbatch(
                microbatch,
                rest,
                plan,
                mix(seed, self._mesh.data_rank, index),
                recorder,
                starts[0 if cut.is_filler(index) else index],
                index in (0, number % len(cut.sizes)),
            )
            for index, (microbatch, plan) in enumerate(zip(batches, plans, strict=True))
        ]
        return StepPass(
            microbatches,
            cut,
            trains,
            scale,
            accumulated,
            self._runners_of(step),
            held,
            recorder,
            metrics,
            carries,
            wholes,
            counts,
            frozenset(self._placed.observer.unsure.get(step, ())),
            mode[0],
        )

    def cut(self, batch: Any, step: str, trains: bool = False) -> Cut:
        """How a batch's rows are dealt out to microbatches.

        Args:
            batch: The batch.
            step: Name of the step method.
            trains: Whether the module is going to be trained in this run.
        """
        # BatchNorm refuses to normalise a single row in training.
        by_batch = normalises_batches(self._module)
        min_rows = 2 if by_batch or (trains and names_of_norms(self._module)) else 1

        def choose(rows: int) -> tuple[int, int]:
            # An evaluation by the statistics of its batches is exact with whole ones only.
            whole = by_batch and step != "training_step"
            return self._options.schedule.choose_microbatches(
                rows,
                self._options.num_microbatches,
                self._mesh.sizes.pipeline,
                self._options.stages_per_rank,
                rows if whole or rows < min_rows else min_rows,
            )

        return choose_cut(batch, step, loader_levels(self._module, batch), choose, min_rows)

    def microbatches(self, batch: Any, cut: Cut, step: str) -> list[Any]:
        """The microbatches of a batch, fillers included."""
        return cut_together(batch, step, loader_levels(self._module, batch), cut)

    def runner(self, step: str, stage: int) -> Runner:
        """What runs a stage of this rank in a step."""
        manner = self._options.manner(stage == self._mesh.num_stages - 1)
        return Runner(self._module, stage, self._contexts[step], self._device, manner)

    def blocks(self) -> list[tuple[object, str, Any]]:
        """Patches of the modules that are to be computed again in the backward."""
        kinds, arguments = self._options.activation_checkpointing, self._options.compile

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            return forward if arguments is None else compiled(forward, arguments)

        if self._repeated is None:
            kinds = () if isinstance(kinds, str) else kinds
            self._repeated = recomputed_blocks(self._module, kinds, self._device, wrap)
        return self._repeated

    def _plans_of(
        self,
        step: str,
        batch: Any,
        microbatches: list[Any],
        cut: Cut,
        rest: tuple[Any, ...],
        mode: Hashable,
    ) -> list[StepPlan]:
        starts = self._placed.observer.carries.likely_starts(step, cut.sizes)
        alike: dict[Hashable, StepPlan] = {}

        def plan(index: int, microbatch: Any) -> StepPlan:
            number = 0 if cut.is_filler(index) else index
            # Behind the number of the batch stands that of the loader, on which steps may depend.
            start = signature(starts[number])
            key = (step, signature(microbatch), rest[1:], mode, start, len(cut.sizes) > 1)
            if key in alike:
                return alike[key]
            example = Example(batch, microbatch, (cut.rows, cut.sizes[number]), rest)
            context = self._contexts[step]
            there = [(self._module, *x) for x in starts[number].items() if x[1] is not ABSENT]
            with patched(there):
                found, is_new = self.plans.get(
                    step, key, lambda: self._placed.plan(step, example, context)
                )
            if is_new:
                self.plans.guard(found, starts[number])
            alike[key] = found
            return found

        return [plan(index, microbatch) for index, microbatch in enumerate(microbatches)]

    def _runners_of(self, step: str) -> dict[int, Runner]:
        if step not in self._runners:
            self._runners[step] = {s: self.runner(step, s) for s in self._mesh.stages}
        return self._runners[step]

    def _mode(self) -> tuple[Hashable, bool, bool]:
        """What a plan depends on besides shapes, modes of modules first; equal on all ranks."""
        return (
            modes_of(self._module),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
