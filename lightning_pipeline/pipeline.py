"""The steps of a LightningModule, run over the stages that hold its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.batchnorm import Norms
from lightning_pipeline.comparing import FirstStep
from lightning_pipeline.computing import SharedCompute
from lightning_pipeline.engine import Engine
from lightning_pipeline.errors import StepError
from lightning_pipeline.hooks import arguments_after_batch
from lightning_pipeline.lazies import initialise
from lightning_pipeline.loaders import SameBatch
from lightning_pipeline.logs import LogExchange
from lightning_pipeline.mesh import Mesh, Scope
from lightning_pipeline.observing import Candidate, Context, Example
from lightning_pipeline.options import Options
from lightning_pipeline.placing import Held, PlacedModule, share
from lightning_pipeline.plan import Plan
from lightning_pipeline.planning.choosing import choose
from lightning_pipeline.preparing import Preparer
from lightning_pipeline.refusals import check_uncut
from lightning_pipeline.sharing import share_state
from lightning_pipeline.steps import (
    MicrobatchBuffers,
    append,
    kept_random_state,
    mix,
    patched,
    seed_all,
    set_attributes,
)
from lightning_pipeline.writing import Writers


class Pipeline:
    """One LightningModule over the stages of one run.

    Args:
        module: The user's LightningModule, all weights present.
        mesh: The rank's place, groups built.
        options: The user's choices.
        device: The rank's device.
        seed: Seed of all random numbers inside steps, equal on every rank.
        contexts: Precision context of each step method, by its name.
        placed: The module as an earlier run left it spread; ``None`` if it is whole.

    Attributes:
        engine: What runs its passes.
        norms: Its norms that are changed for the run, if some are.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        options: Options,
        device: torch.device,
        seed: int,
        contexts: Mapping[str, Context],
        placed: PlacedModule | None = None,
    ) -> None:
        check_uncut(module, options.uncut)
        self._module, self._mesh, self._options = module, mesh, options
        self._device, self._seed, self._contexts = device, seed, contexts
        self._placed = placed or PlacedModule(module, mesh, options, device, seed)
        if placed is not None:
            placed.go_on()
        self.engine = Engine(mesh, options.schedule, options.stages_per_rank, device)
        self._exchange = LogExchange(module, mesh, device)
        self._computed = SharedCompute(module, mesh)
        self._writers = Writers(module.trainer.callbacks, mesh)  # type: ignore[attr-defined]
        self._buffers = MicrobatchBuffers(module)
        self._preparer = Preparer(module, self._placed, mesh, options, device, seed, contexts)
        self._seen: dict[str, Candidate] = {}
        self._trained = False
        self.norms: Norms | None = None
        args = contexts["training_step"], partial(self._preparer.runner, "training_step")
        self._first = FirstStep(module, mesh, device, *args, options.validates)

    @property
    def module(self) -> LightningModule:
        """The user's LightningModule."""
        return self._module

    @property
    def placed(self) -> PlacedModule:
        """Where its weights live."""
        return self._placed

    @property
    def is_placed(self) -> bool:
        """Whether the first batch has been seen."""
        return self._placed.placement is not None

    @property
    def held(self) -> Held:
        """What this rank holds."""
        assert self._placed.held is not None, "no batch has been seen yet"
        return self._placed.held

    @property
    def holders(self) -> Mapping[str, frozenset[int]]:
        """Stages that hold each parameter and buffer, by canonical name."""
        assert self._placed.placement is not None, "no batch has been seen yet"
        return self._placed.placement.holders

    def place(
        self, step: str, args: tuple[Any, ...], fitting: bool, show: Callable[[Plan], None]
    ) -> Options:
        """Places the module by its first batch.

        Args:
            step: The step that is about to run.
            args: Its arguments.
            fitting: Whether the run trains; the module is then placed by its training step, also
                if a validation comes first, such that its validation can follow.
            show: Called with the plan.

        Returns:
            The options, with what the batch has decided.
        """
        same = SameBatch(step, args[0], self._mesh, self._device)
        same.require()
        same.require_values()
        if fitting and self._options.open is not None:
            self._choose(args[0])
        cut = self._preparer.cut(args[0], step, trains=fitting)
        microbatch = self._preparer.microbatches(args[0], cut, step)[0]
        rows = cut.rows, cut.sizes[0]
        steps = ["training_step", "validation_step"] if fitting else [step]

        def candidate(name: str) -> Candidate:
            rest = args[1:] if name == step else arguments_after_batch(self._module, name)
            example = Example(args[0], microbatch, rows, rest)
            return Candidate(name, self._contexts[name], example, name == step)

        self._seen[step] = candidate(step)
        candidates = [
            self._seen.get(name) or candidate(name)
            for name in steps
            if name == step or name == "training_step" or self._module.trainer.enable_validation
        ]
        self._initialise(candidates)
        self._placed.place(candidates, lambda plan: show(self._placed.describe(plan, cut.total)))
        if not self._placed.is_provisional:
            self._seen = {}
        return self._options

    def _choose(self, batch: Any) -> None:
        """Takes the schedule, stages and microbatches that are predicted to be best."""
        context, device = self._contexts["training_step"], self._device
        self._options = options = choose(
            self._module, batch, self._options, self._mesh, device, context
        )
        self._mesh.reschedule(options.schedule, options.stages_per_rank)
        self._placed.reschedule(options)
        self._preparer.start_anew(options)
        observer = self.engine.observer
        self.engine = Engine(self._mesh, options.schedule, options.stages_per_rank, device)
        self.engine.observer = observer

    def take_back(self) -> None:
        """Makes the module whole again during a run, such that it can be placed anew.

        Raises:
            StepError: If it was built without memory for all of its weights.
        """
        if self._placed.began_without_weights:
            raise StepError(
                "training_step cannot run on the batch of the validation that the module was "
                "placed by, and a module that was built without memory for its weights is placed "
                "once. Set Trainer(num_sanity_val_steps=0), so that the training comes first."
            )
        self.engine.clear()
        self._preparer.start_anew(self._options)
        self._seen = {n: dataclasses.replace(seen, is_next=False) for n, seen in self._seen.items()}
        self._placed.put_back()
        self._placed.reschedule(self._options)  # without what one rank alone may have observed

    def _initialise(self, candidates: list[Candidate]) -> None:
        """Lets lazy modules become what they are going to be."""
        with torch.inference_mode(False), torch.enable_grad(), self._mesh.within(Scope.ALONE):
            if not initialise(self._module, candidates):
                return
        share_state(self._module, self._mesh, self._device)
        if self.norms is not None:
            self.norms.change()

    def share_buffers(self) -> None:
        """Gives all replicas the buffers of the first one, as DDP does before a forward.

        Only training writes to them, so it does nothing behind an evaluation.
        """
        if self._trained and self._mesh.sizes.data > 1:
            share(self.held.buffers, self._mesh.data_ranks[0], self._mesh.data_group)
        self._trained = False

    def abandon(self) -> None:
        """Takes off what was put on the module, without talking to other ranks."""
        self._computed.remove()
        self._writers.remove()
        self.engine.clear()
        if self.norms is not None:
            self.norms.restore()
            self.norms = None

    def pause(self) -> None:
        """Ends a run and leaves the weights where they are."""
        self.abandon()
        if self.is_placed:
            self.share_buffers()

    def put_back(self) -> None:
        """Makes the module whole again on every rank."""
        self.pause()
        self._placed.put_back()

    def run(
        self,
        step: str,
        args: tuple[Any, ...],
        *,
        trains: bool,
        scale: float | Tensor = 1.0,
        accumulated: int = 1,
        count: int | None = None,
    ) -> tuple[Tensor, Any]:
        """Runs one step over the pipeline and replays its logs.

        Args:
            step: Name of the step method.
            args: Its arguments, the batch first.
            trains: Whether to run the backward.
            scale: Factor of the loss in the backward.
            accumulated: Number of batches whose gradients are averaged.
            count: Number of this batch in the run, for its random numbers; ``None`` counts here.

        Returns:
            The loss over the batch and what the step returned for the whole batch, equal on all
            ranks of the pipeline.
        """
        same = SameBatch(step, args[0], self._mesh, self._device, self._preparer.plans.look())
        self._trained |= trains
        try:
            work = self._preparer.prepare(step, args, trains, scale, accumulated, count)
        except Exception:
            same.require()  # which explains more
            raise
        work.same = same
        if trains and not self._first.is_over:
            same.require()
            self._first.run(work, args[0], self._placed)
        self._computed.inside_step = True
        try:
            blocks = self._preparer.blocks() if trains else []
            if trains and not blocks:
                work.buffers = self._buffers
            with kept_random_state(self._device):
                with self._mesh.within(Scope.REPLICAS), patched(blocks):
                    self.engine.run(work)
                same.require_values()
                if self.norms is not None:
                    self.norms.end_batch()
                seed_all(mix(self._seed, work.microbatches[0].seed), self._device)
                work.metrics.finish()
        finally:
            self._computed.inside_step = False
            self._buffers.settle()
            set_attributes(self._module, work.wholes)
        self._computed.forget()
        work.check_dependence(self._mesh.is_last)
        recorder, weight, more = None, None, None
        if self._mesh.is_last:
            work.settle()
            recorder, weight, more = work.recorder, work.weight(), work.more()
        loss, weight, more = self._exchange(recorder, work.loss(), weight, more)
        if trains:
            self.held.reducer.weigh(weight)
            self._first.note(loss)
        work.check_fingerprints()
        output, appended, assigned = more or (None, {}, {})
        for path, entries in appended.items():
            append(self._module, path, entries)
        for name, value in assigned.items():
            setattr(self._module, name, value)
        return loss, output

    def complete(self) -> None:
        """Completes the gradients after a backward, and compares those of the first step."""
        is_last = self.held.reducer.armed
        self.held.reducer.complete()
        if is_last:
            self._first.compare(self.held)
