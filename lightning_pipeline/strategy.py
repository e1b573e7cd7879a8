"""PipelineStrategy: a LightningModule's life on several ranks that each hold a part of it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.averaging import Averages
from lightning_pipeline.batchnorm import Norms
from lightning_pipeline.building import BuildingStrategy
from lightning_pipeline.epochs import end_together
from lightning_pipeline.gradients import Parking
from lightning_pipeline.hooks import sees_each_backward, sees_old_gradients, without_compilation
from lightning_pipeline.lightning_private import set_device
from lightning_pipeline.mesh import Mesh, MeshSizes, resolve_sizes
from lightning_pipeline.monitoring import (
    count_replicas,
    decide_together,
    keep_examples_with_weights,
)
from lightning_pipeline.norms import WholeNorm
from lightning_pipeline.observing import Context
from lightning_pipeline.options import BalanceBy, Recompute, options_of
from lightning_pipeline.pipeline import Pipeline
from lightning_pipeline.placing import Held
from lightning_pipeline.plan import Plan
from lightning_pipeline.refusals import (
    check_callbacks,
    check_checkpoint_io,
    check_gathering,
    check_memory,
    check_module,
    check_module_name,
    check_optimizers,
    check_precision,
    check_start_method,
    one_optimizer,
)
from lightning_pipeline.scaling import loss_scale, share_scaler
from lightning_pipeline.schedules import SCHEDULES
from lightning_pipeline.sharing import share_random_state, share_state
from lightning_pipeline.steps import random_state, set_random_state

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _nothing() -> None:
    """Ends what has not begun."""


class PipelineStrategy(BuildingStrategy):
    """Trains an unmodified LightningModule over devices that each hold a part of it.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(devices=4, strategy=PipelineStrategy(schedule="1F1B"))

    Args:
        pipeline_parallel_size: Ranks in one pipeline; ``"auto"``: all devices divided by
            ``data_parallel_size``.
        data_parallel_size: Replicas of the pipeline; ``"auto"``: what is left, 1 when both are
            auto.
        schedule: Name of a schedule, as in the README or in snake case, or path of a ``.csv`` file.
        num_microbatches: Microbatches of a training batch; ``"auto"``: the largest count up to
            four a rank that the schedule and the batch allow.
        stages_per_rank: Stages on each rank; ``"auto"``: 1 for single-stage schedules, 2 otherwise.
        module: Dotted name of the module to cut; ``None``: found by itself.
        partition: ``"auto"`` balances cost, ``"uniform"`` counts blocks, a list of dotted names
            gives the module that begins each stage after the first.
        balance_by: ``"cost"`` of the recorded operations, or ``"time"`` that the modules take.
        activation_checkpointing: What keeps only its inputs and runs again in the backward:
            ``"none"``, ``"full"`` (each stage), ``"except_last"``, or a list of module classes.
        compile: Whether each stage is compiled; a dict has arguments of ``torch.compile``.
        deferred_batch_norm: Whether the running statistics of BatchNorm are those of whole batches.
        save_distributed_checkpoint: Whether a checkpoint is a folder into which every rank writes
            what it holds; else it is one plain Lightning file. Both load into any layout.
        gather_after_run: Whether the module is whole again on every rank after a run. With
            ``False`` it stays spread: for the next run of the same Trainer, or for checkpoints. So
            does a module that was built without weights.
        weights: File or folder with initial weights of the module or of one submodule:
            safetensors, as ``save_pretrained`` writes them, or a checkpoint.
        validate: ``"first_step"`` compares loss and gradients of a fit's first optimizer step with
            those of an unpipelined run, where every rank has memory for it, and tells the largest
            difference.
        process_group_backend: As in Lightning's DDPStrategy.
        timeout: As in Lightning's DDPStrategy.
        start_method: As in Lightning's DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"``.

    Raises:
        ValueError: If the schedule and the counts do not go together; names the nearest that do.
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        schedule: str = "1F1B",
        num_microbatches: int | Literal["auto"] = "auto",
        stages_per_rank: int | Literal["auto"] = "auto",
        module: str | None = None,
        partition: Literal["auto", "uniform"] | Sequence[str] = "auto",
        balance_by: BalanceBy = "cost",
        activation_checkpointing: Recompute | Sequence[type[torch.nn.Module]] = "none",
        compile: bool | dict[str, Any] = False,
        deferred_batch_norm: bool = False,
        save_distributed_checkpoint: bool = False,
        gather_after_run: bool = True,
        weights: str | Path | None = None,
        validate: Literal["first_step"] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self._options = options = options_of(
            *(schedule, stages_per_rank, num_microbatches, partition, module),
            *(activation_checkpointing, compile, deferred_batch_norm, balance_by, validate),
        )
        check_start_method(start_method, gather_after_run)
        self._shards_checkpoints = save_distributed_checkpoint
        self._gathers_after_run, self._weights = gather_after_run, weights
        if isinstance(pipeline_parallel_size, int):
            options.check(pipeline_parallel_size)
        self._parking = Parking()
        self._parks = False
        self._norm: WholeNorm | None = None
        self._averages: Averages | None = None
        self._end_examples: Callable[[], None] = _nothing

    # environment

    @override
    def _configure_launcher(self) -> None:
        self._check_sizes()  # the Trainer is being made: no process has started yet
        super()._configure_launcher()

    def _check_sizes(self) -> MeshSizes:
        sizes = resolve_sizes(self.num_nodes * self.num_processes, *self._sizes)
        options = self._options
        options.check(sizes.pipeline)
        return sizes

    @override
    def setup_environment(self) -> None:
        self._require_groups()
        sizes, options, module = self._check_sizes(), self._options, self.lightning_module
        if module is not None:
            check_callbacks(module)
        state = random_state()
        super().setup_environment()
        if sizes.data == 1:  # Lightning's reset of the seed, for DDP, shuffles unlike one device
            set_random_state(state)
        self._begin()
        if self._mesh is None:
            mesh = Mesh(sizes, options.schedule, self.global_rank, options.stages_per_rank)
            self.extent(0)  # a wait that the watch can break off, unlike that for new groups
            mesh.build_groups(self._timeout, self.root_device)
            self._mesh = mesh
            atexit.register(mesh.leave)  # Lightning does so for NCCL alone
        if module is not None:  # its callbacks are about to be set up
            if self._averages is not None:
                self._averages.abandon()
            callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
            self._averages = Averages(callbacks, module, self.mesh, self.root_device)

    # setup

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        without_compilation(module)
        self._defer_weights()
        kept = self._kept_pipeline(module)
        if kept is not None and fitting and self._options.open is not None:
            rank_zero_warn(
                f"schedule='auto' is not chosen for this fit, which goes on with "
                f"{self._options.schedule.name}: an evaluation before it has placed the module. "
                "Fit first, name a schedule, or set gather_after_run=True."
            )
        self._check(trainer, module, fitting)
        self._deal_out(trainer)
        share_random_state(self.mesh, self.root_device)
        self.precision_plugin.convert_module(module)
        assert self._averages is not None
        for copy in (module, *self._averages.copies):
            share_state(copy, self.mesh, self.root_device)
        self.model_to_device()
        self._end_examples = keep_examples_with_weights(module)
        count_replicas(trainer.callbacks, self.mesh.sizes)  # type: ignore[attr-defined]
        decide_together(trainer)
        end_together(trainer)
        self._pipeline = self._make_pipeline(module, kept)
        if fitting:
            everything = self._layer_sync is not None and self.mesh.sizes.data > 1
            defers = self._options.deferred_batch_norm
            self.setup_optimizers(trainer)
            self._pipeline.norms = Norms(module, self.mesh, everything, defers)
        self.setup_precision_plugin()
        if fitting:
            self._norm = WholeNorm(self.mesh, self._what_is_held, self.root_device)

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule, fitting: bool) -> None:
        """Refuses what cannot be run, before anything is changed."""
        check_module_name(module, self._options.module)
        check_precision(self.precision_plugin)
        check_memory(module)
        self._check_deferred()
        if self._shards_checkpoints:
            check_checkpoint_io(self.checkpoint_io)
        if not self._gathers_after_run:
            check_gathering(trainer.callbacks)  # type: ignore[attr-defined]
        if fitting:
            check_module(module, self._layer_sync)

    def _make_pipeline(self, module: pl.LightningModule, kept: Pipeline | None) -> Pipeline:
        plugin = self.precision_plugin
        contexts: tuple[Context, ...] = (
            plugin.train_step_context,
            plugin.val_step_context,
            plugin.test_step_context,
            plugin.predict_step_context,
        )
        seed = self.broadcast(torch.initial_seed() % 2**62)
        context = dict(zip(_STEPS, contexts, strict=True))
        args = module, self.mesh, self._options, self.root_device, seed, context
        pipeline = Pipeline(*args, None if kept is None else kept.placed)
        pipeline.placed.defer(self._deferred)
        return pipeline

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        with one_optimizer(self.lightning_module):
            super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.mesh.sizes.pipeline)
        if self._what_is_held() is not None:  # an earlier run left the module spread
            self._drop_foreign_state()

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        share_scaler(self.precision_plugin, self.root_device)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        set_device(self.lightning_module, self.root_device)  # the weights follow when placed

    # steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, pipeline = self._placed("training_step", args)
        loop, accumulated = module.trainer.fit_loop, module.trainer.accumulate_grad_batches
        parameters = [p for group in self.optimizers[0].param_groups for p in group["params"]]
        self._parks = first_pass = loop.epoch_loop.batch_idx % accumulated == 0
        if first_pass:
            pipeline.share_buffers()
            self._parking.clear_for_step(parameters, keep_old=sees_old_gradients(module))
        last_pass, reducer = not loop._should_accumulate(), pipeline.held.reducer
        reducer.arm(first_pass, last_pass, sums=sees_each_backward(module))
        with self._failing_together("training_step"):
            loss, output = pipeline.run(
                "training_step",
                args,
                trains=True,
                scale=loss_scale(self.precision_plugin, self.root_device),
                accumulated=accumulated,
                count=loop.total_batch_idx,
            )
        if self._parks:
            self._parking.park(parameters)
        return loss if output is None else {**output, "loss": loss}

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None and self._pipeline is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._failing_together("backward"):
            self._parking.hand_back(self._pipeline.complete)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _what_is_held(self) -> Held | None:
        placed = self._pipeline is not None and self._pipeline.is_placed
        return self._pipeline.held if placed else None  # type: ignore[union-attr]

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args)

    def _evaluate(self, step: str, args: tuple[Any, ...]) -> Any:
        _, pipeline = self._placed(step, args)
        pipeline.share_buffers()
        with self._failing_together(step):
            return pipeline.run(step, args, trains=False)[1]

    def _placed(self, step: str, args: tuple[Any, ...]) -> tuple[pl.LightningModule, Pipeline]:
        """The module and its pipeline, placed by the first batch of the run."""
        module, pipeline = self.lightning_module, self._pipeline
        assert module is not None and pipeline is not None and self._averages is not None
        again = step == "training_step" and pipeline.placed.is_provisional
        if again or not pipeline.is_placed:
            self._end_examples()
            fitting = module.trainer.state.fn == TrainerFn.FITTING
            with self._failing_together(step):
                if again:
                    pipeline.take_back()
                    self._averages.take_back()
                self._options = pipeline.place(step, args, fitting, self._show)
                self._averages.release(pipeline.holders)
            self._deferred = self._recipes = None
            if not pipeline.placed.is_provisional:
                self._load_held_state()
        return module, pipeline

    def _show(self, plan: Plan) -> None:
        known, self.plan = self.plan, plan
        if self.is_global_zero and plan.adds_to(known):
            plan.print()

    # end

    @override
    def teardown(self) -> None:
        self._end()
        self._end_examples()
        if self._norm is not None:
            self._norm.remove()
            self._norm = None
        if self._failed:
            # Other ranks may wait for this one for ever, and a rank inside a collective does not
            # react to SIGTERM: no collective from here on, and no child is left behind.
            self._end_children()
            if self._pipeline is not None:
                self._pipeline.abandon()
                self._pipeline = None
            if self._averages is not None:
                self._averages.abandon()
            self._parking = Parking()
            self.precision_plugin.teardown()
            assert self.accelerator is not None
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
            self.through()
            return
        self._leave_pipeline()
        if self._averages is not None:
            self._averages.put_back()
            self._averages = None
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``pipeline``, one name a schedule and one a start method."""
        names = {"pipeline": {}, "pipeline_fork": {"start_method": "fork"}}
        names["pipeline_spawn"] = {"start_method": "spawn"}
        names |= {f"pipeline_{entry.snake}": {"schedule": entry.name} for entry in SCHEDULES}
        for name, arguments in names.items():
            strategy_registry.register(
                name, cls, description=f"Pipeline parallelism {arguments or ''}", **arguments
            )
