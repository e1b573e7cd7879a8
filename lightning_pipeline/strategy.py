"""PipelineStrategy: a LightningModule's life on several ranks that each hold a part of it."""

from __future__ import annotations

import atexit
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import rich
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline import checkpoint as checkpoints
from lightning_pipeline.axes import AxesStrategy
from lightning_pipeline.errors import PipelineError
from lightning_pipeline.gradients import Parking
from lightning_pipeline.hooks import sees_old_gradients
from lightning_pipeline.mesh import Mesh, MeshSizes, resolve_sizes
from lightning_pipeline.norms import WholeNorm
from lightning_pipeline.pipeline import Pipeline
from lightning_pipeline.placing import Context, Held, Options
from lightning_pipeline.plan import Plan
from lightning_pipeline.refusals import (
    check_module,
    check_module_name,
    check_optimizers,
    check_parameters,
)
from lightning_pipeline.schedules import SCHEDULES, get_schedule, require_count
from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.steps import random_state, set_random_state

_LOST_PEER = re.compile("connection (closed|reset) by peer", re.IGNORECASE)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class PipelineStrategy(AxesStrategy):
    """Trains an unmodified LightningModule over devices that each hold a part of it.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(devices=4, strategy=PipelineStrategy(schedule="1F1B"))

    Args:
        pipeline_parallel_size: Ranks in one pipeline; ``"auto"``: all devices divided by
            ``data_parallel_size``.
        data_parallel_size: Replicas of the pipeline; ``"auto"``: what is left, 1 when both are
            auto.
        schedule: Any schedule of torch.distributed.pipelining by its name there, or in snake case.
        num_microbatches: Microbatches of a training batch; ``"auto"``: the largest count up to
            four a rank that the schedule and the batch allow.
        stages_per_rank: Stages on each rank; ``"auto"``: 1 for single-stage schedules, 2 otherwise.
        module: Dotted name of the module to cut; ``None``: found by itself.
        partition: ``"auto"`` balances cost, ``"uniform"`` counts blocks, a list of dotted names
            gives the module that begins each stage after the first.
        save_distributed_checkpoint: Must be ``False``: a checkpoint is one plain Lightning file.
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
        save_distributed_checkpoint: bool = False,
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
        chosen = get_schedule(schedule)
        self._options = Options(
            chosen,
            chosen.resolve_stages_per_rank(stages_per_rank),
            num_microbatches,
            partition if isinstance(partition, str) else tuple(partition),
            module,
        )
        if save_distributed_checkpoint:
            raise ValueError(
                "save_distributed_checkpoint must be False, got True: checkpoints are one plain "
                "Lightning file, gathered on global rank 0. Remove the argument."
            )
        if num_microbatches != "auto":
            require_count("num_microbatches", num_microbatches)
        if isinstance(pipeline_parallel_size, int):
            chosen.check(pipeline_parallel_size, stages_per_rank, num_microbatches)
        self._pipeline: Pipeline | None = None
        self._parking = Parking()
        self._parks = False
        self._norm: WholeNorm | None = None
        self._failed = False
        self.plan: Plan | None = None

    # environment

    @override
    def _configure_launcher(self) -> None:
        self._check_sizes()  # the Trainer is being made: no process has started yet
        super()._configure_launcher()

    def _check_sizes(self) -> MeshSizes:
        sizes = resolve_sizes(self.num_nodes * self.num_processes, *self._sizes)
        options = self._options
        options.schedule.check(sizes.pipeline, options.stages_per_rank, options.num_microbatches)
        return sizes

    @override
    def setup_environment(self) -> None:
        sizes, options = self._check_sizes(), self._options
        state = random_state()
        super().setup_environment()
        set_random_state(state)  # Lightning's reset of the seed would shuffle unlike one device
        if self._mesh is None:
            mesh = Mesh(sizes, options.schedule, self.global_rank, options.stages_per_rank)
            mesh.build_groups(self._timeout)
            self._mesh = mesh
            atexit.register(mesh.leave)  # Lightning does so for NCCL alone

    # setup

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._failed = False
        module = self.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_module_name(module, self._options.module)
        check_parameters(module)
        if fitting:
            check_module(module, self._layer_sync is not None)
        if self.mesh.sizes.data == 1:
            # Lightning's injected DistributedSampler always shuffles in training.
            trainer._accelerator_connector.use_distributed_sampler = False
        self._share_random_state()
        self.precision_plugin.convert_module(module)
        self._share_state(module)
        self.model_to_device()
        self._pipeline = self._make_pipeline(module)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._norm = WholeNorm(self.mesh, self._what_is_held, self.root_device)

    def _make_pipeline(self, module: pl.LightningModule) -> Pipeline:
        plugin = self.precision_plugin
        contexts: tuple[Context, ...] = (
            plugin.train_step_context,
            plugin.val_step_context,
            plugin.test_step_context,
            plugin.predict_step_context,
        )
        seed = self.broadcast(torch.initial_seed() % 2**62)
        context = dict(zip(_STEPS, contexts, strict=True))
        return Pipeline(module, self.mesh, self._options, self.root_device, seed, context)

    def _share_state(self, module: pl.LightningModule) -> None:
        """Starts every rank with the weights of global rank 0, which stay where they are."""
        for tensor in {id(t): t for *_, t in state_items(module)}.values():
            value = tensor.data.to(self.root_device).contiguous()
            dist.broadcast(value, 0)
            tensor.data.copy_(value)

    def _share_random_state(self) -> None:
        """Lets ranks of one pipeline shuffle alike, with or without a seed."""
        box = [random_state()]
        group, source = self.mesh.pipeline_group, self.mesh.last_rank
        dist.broadcast_object_list(box, source, group)
        set_random_state(box[0])
        if self.root_device.type == "cuda":
            torch.cuda.manual_seed(torch.initial_seed())

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            # A rank sees only its own infinities; all ranks must skip the same steps.
            shared = ShardedGradScaler(self.root_device.type, process_group=dist.group.WORLD)
            shared.load_state_dict(scaler.state_dict())
            self.precision_plugin.scaler = shared  # type: ignore[attr-defined]

    @override
    def model_to_device(self) -> None:
        # The weights follow when they are placed: a device need not hold the whole model.
        assert self.lightning_module is not None
        self.lightning_module._device = self.root_device

    # steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, pipeline = self._placed("training_step", args)
        loop, accumulated = module.trainer.fit_loop, module.trainer.accumulate_grad_batches
        parameters = [p for group in self.optimizers[0].param_groups for p in group["params"]]
        self._parks = loop.epoch_loop.batch_idx % accumulated == 0
        if self._parks:
            pipeline.share_buffers()
            self._parking.clear_for_step(parameters, keep_old=sees_old_gradients(module))
        pipeline.held.reducer.arm(self._parks, last_pass=not loop._should_accumulate())
        with self._failing_together():
            loss, output = pipeline.run(
                "training_step",
                args,
                trains=True,
                scale=self._gradient_scale(),
                accumulated=accumulated,
                count=loop.total_batch_idx,
            )
        if self._parks:
            self._parking.park(parameters)
        return loss if output is None else {**output, "loss": loss}

    def _gradient_scale(self) -> float | Tensor:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None and self._pipeline is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._parking.hand_back(self._pipeline.held.reducer.complete)
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
        with self._failing_together():
            return pipeline.run(step, args, trains=False)[1]

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Notes a failure before callbacks hear of it: none may wait for other ranks any more."""
        try:
            yield
        except BaseException as error:
            self._failed = True
            if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
                raise PipelineError(
                    f"Rank {self.global_rank} lost its connection to another rank, which has "
                    "failed or was ended. That rank's own error is in its output."
                ) from error
            raise

    def _placed(self, step: str, args: tuple[Any, ...]) -> tuple[pl.LightningModule, Pipeline]:
        """The module and its pipeline, placed by the first batch of the run."""
        module, pipeline = self.lightning_module, self._pipeline
        assert module is not None and pipeline is not None
        if not pipeline.is_placed:
            fitting = module.trainer.state.fn == TrainerFn.FITTING
            with self._failing_together():
                pipeline.place(step, args, fitting, self._show)
            self._drop_foreign_state()
        return module, pipeline

    def _show(self, plan: Plan) -> None:
        if plan == self.plan:
            return
        self.plan = plan
        if self.is_global_zero:
            rich.print(plan)
        for note in plan.notes:
            rank_zero_warn(note)

    def _drop_foreign_state(self) -> None:
        """Optimizer state of parameters that are elsewhere goes, the rest follows its parameter."""
        for optimizer in self.optimizers:
            for parameter in [p for p in optimizer.state if is_elsewhere(p)]:
                del optimizer.state[parameter]
        _optimizers_to_device(self.optimizers, self.root_device)

    # checkpoints

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        checkpoints.load(self.lightning_module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Not to the device yet: before the first batch this is the state of the whole model.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        if self._pipeline is not None and self._pipeline.is_placed:
            self._drop_foreign_state()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self._failed:
            raise PipelineError(
                f"No checkpoint is written to {filepath}: a rank of the pipeline has failed, and "
                "the others' parts of the model cannot be had any more. Continue from the last "
                "checkpoint."
            )
        whole = checkpoints.gather(checkpoint, self.mesh)
        if whole is not None:
            super().save_checkpoint(whole, filepath, storage_options)
        self.barrier()

    # end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if not isinstance(exception, KeyboardInterrupt) and not self.is_global_zero:
            text = "".join(traceback.format_exception(exception))
            sys.stderr.write(f"\n[rank {self.global_rank}] failed:\n{text}")
            sys.stderr.flush()

    @override
    def teardown(self) -> None:
        if self._norm is not None:
            self._norm.remove()
            self._norm = None
        if self._failed:
            # Other ranks may wait for this one for ever, and a rank inside a collective does not
            # react to SIGTERM: no collective from here on, and no child is left behind.
            if isinstance(self._launcher, _SubprocessScriptLauncher):
                self._launcher.kill(signal.SIGKILL)
            if self._pipeline is not None:
                self._pipeline.abandon()
            self.precision_plugin.teardown()
            assert self.accelerator is not None
            self.accelerator.teardown()
            return
        if self._pipeline is not None:
            self._pipeline.put_back()
            self._pipeline = None
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
