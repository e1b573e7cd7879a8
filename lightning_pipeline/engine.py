"""One pass over the stages: torch's pipeline schedules, driven with static metadata.

The only module that runs torch.distributed.pipelining. Its private names are those of torch 2.13.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo

from lightning_pipeline.actions import action_lists
from lightning_pipeline.boundary import can_split, check_planned, cross, forget_values
from lightning_pipeline.cache import Cache
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.sends import Sends
from lightning_pipeline.steps import TensorMeta

# On an error torch logs the whole action list of the schedule around the user's traceback.
logging.getLogger(torch_schedules.__name__).setLevel(logging.CRITICAL)

_EMPTY = TensorMeta((0,), torch.float32, False)
# As many as plans: a pass has meta tensors and lists of actions only, 2 ms to make, but a run that
# goes through more shapes in turn than fit would make one every step.
_CACHED_PASSES = 256


class Work(Protocol):
    """What the engine runs: the parts of one batch's step.

    Attributes:
        num_microbatches: Number of microbatches, a count that the schedule allows.
        trains: Whether there is a backward.
        key: Equal for two batches whose boundaries have the same metadata.
    """

    trains: bool

    @property
    def num_microbatches(self) -> int:
        """At least 1."""

    @property
    def key(self) -> Hashable:
        """Compared and hashed only."""

    def boundary(self, stage: int, microbatch: int) -> list[TensorMeta]:
        """Tensors that ``stage`` receives."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        """Values for the next stage; the unscaled loss on the last."""

    def loss_factor(self, microbatch: int) -> float | Tensor:
        """What the loss of ``microbatch`` is multiplied by before its backward."""

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Parameters that ``stage`` holds."""

    def returned(self, stage: int, microbatch: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradients of what ``stage`` received are there."""

    def finished(self, stage: int) -> None:
        """All weight gradients of ``stage`` are there."""


class _Body(nn.Module):
    """The module that torch sees as a stage. It registers no submodule: the model stays whole."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.microbatch, self.num_sent = index, 0, 0
        self.work: Work

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.work.parameters(self.index))

    def forward(self, *received: Tensor) -> Any:
        work, microbatch = self.work, self.microbatch
        if received:  # empty ones at the end only make the counts of all microbatches equal
            received = received[: len(work.boundary(self.index, microbatch))]
        out = work.forward(self.index, microbatch, tuple(map(cross, received)))
        if isinstance(out, Tensor):
            return out
        metas = work.boundary(self.index + 1, microbatch)
        check_planned(self.index, out, metas)
        # A gradient comes back only where the plan says so.
        sent = [
            cross(value if meta.requires_grad else value.detach())
            for value, meta in zip(out, metas, strict=True)
        ]
        surplus = self.num_sent - len(sent)
        return (*sent, *(out[-1].new_empty(0, dtype=_EMPTY.dtype),) * surplus)


class _Stage(PipelineStage):
    """A stage with metadata of its own for every microbatch, given beforehand.

    Args:
        index: Index of the stage.
        num_stages: Number of stages.
        received: Tensors that arrive, [microbatches][values]; equally many in all microbatches.
        sent: Tensors that leave, likewise.
        connected: Whether neighbours have sent to each other before.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        received: list[list[TensorMeta]],
        sent: list[list[TensorMeta]],
        device: torch.device,
        group: Any,
        connected: bool,
    ) -> None:
        self.body, self._connected = _Body(index), connected
        self._received, self._sent = _as_tensors(received), _as_tensors(sent)
        self._whole_backward: set[int] = set()
        self._splits: dict[tuple[Any, ...], bool] = {}
        self.sends: Sends | None = None
        super().__init__(
            self.body,
            index,
            num_stages,
            device,
            input_args=self._received[0],
            output_args=self._sent[0],
            group=group,
        )
        self.body.num_sent = len(self._sent[0])

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        # The vote on whether all have static metadata: that of the first pass connects neighbours,
        # another one for each new shape would only be messages and a wait for them.
        yes = torch.ones(1, dtype=torch.int32)
        return yes if self._connected else super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Tensor:
        yes = torch.ones(1, dtype=torch.int32)
        return yes if self._connected else super()._warmup_backward_result(*args, **kwargs)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        if not self.is_first:
            for microbatch, metas in enumerate(self._received):
                self._describe(self.args_recv_info[microbatch], metas)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for microbatch, metas in enumerate(self._sent):
            grads = tuple(meta if meta.requires_grad else None for meta in metas)
            self._describe(self.grad_recv_info[microbatch], grads)

    def _describe(self, infos: tuple[_RecvInfo, ...], metas: tuple[Tensor | None, ...]) -> None:
        """Sets this microbatch's own metadata; torch would keep a buffer for each for ever."""
        for info, meta in zip(infos, metas, strict=False):
            info.tensor_meta = None if meta is None else extract_tensor_meta(meta)
            info.buffer = None

    def _make_buffers(self, infos: tuple[_RecvInfo, ...]) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                shape, dtype = info.tensor_meta.shape, info.tensor_meta.dtype
                info.buffer = torch.empty(shape, dtype=dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        # New memory for every message: what the step keeps of it is not overwritten by the next.
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        infos = self.grad_recv_info[mb_index]
        missing = (i for i, grad in zip(infos, next_stage_bwd_outputs, strict=True) if grad is None)
        self._make_buffers(tuple(missing))
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        forget_values(prev_stage_outputs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        forget_values(self.fwd_cache[fwd_chunk_id][0])  # the operations have aliases
        if self.sends is not None:
            return self.sends.post((self.stage_index, "F", fwd_chunk_id), operations)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        # A gradient that is missing is sent as zeros of this microbatch's shape.
        self._stage_meta.input_grads = tuple(
            extract_tensor_meta(meta.detach()) if meta.requires_grad else None
            for meta in self._received[bwd_chunk_id]
        )
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        if self.sends is not None:
            return self.sends.post((self.stage_index, "B", bwd_chunk_id), operations)
        return operations

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.body.microbatch = fwd_chunk_id
        if self.sends is not None:
            self.sends.on_forward(self.stage_index, fwd_chunk_id)
        try:
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            for info in self.args_recv_info[fwd_chunk_id]:
                info.buffer = None
            if not self.has_backward:
                self.fwd_cache[fwd_chunk_id] = (self.fwd_cache[fwd_chunk_id][0], [])
            return out
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch wraps the user's exception

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if self.sends is not None:
            self.sends.wait((self.stage_index, "F", bwd_chunk_id))
        if not full_backward and not self.is_first and not self._can_split(bwd_chunk_id, loss):
            self._whole_backward.add(bwd_chunk_id)
            full_backward = True
        with torch.autocast(self.device.type, enabled=False):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_first:
            self.body.work.returned(self.stage_index, bwd_chunk_id, self.bwd_cache[bwd_chunk_id])
        if full_backward:
            self._forget(bwd_chunk_id, loss)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._whole_backward:
            self._whole_backward.discard(bwd_chunk_id)
            return
        with torch.autocast(self.device.type, enabled=False):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._forget(bwd_chunk_id, None)

    def _forget(self, microbatch: int, loss: Tensor | None) -> None:
        """Lets go of what torch keeps of a microbatch until the end of the pass."""
        for info in self.grad_recv_info[microbatch] if self.has_backward else ():
            info.buffer = None
        if loss is not None:
            loss.detach_()  # it is in the schedule's list of losses, with the whole graph

    def _can_split(self, microbatch: int, loss: Tensor | None) -> bool:
        shapes = tuple(tuple(meta.shape) for meta in self._received[microbatch])
        if shapes not in self._splits:
            outputs, inputs = self.fwd_cache[microbatch]
            self._splits[shapes] = can_split([loss] if self.is_last else outputs, inputs)
        return self._splits[shapes]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            self.body.work.finished(self.stage_index)


def _as_tensors(metas: list[list[TensorMeta]]) -> list[tuple[Tensor, ...]]:
    """Meta tensors of all microbatches, filled up with empty ones to equal counts."""
    most = max(len(values) for values in metas)
    return [
        tuple(
            torch.empty(shape, dtype=dtype, device="meta").requires_grad_(requires_grad)
            for shape, dtype, requires_grad in values + [_EMPTY] * (most - len(values))
        )
        for values in metas
    ]


class Engine:
    """Runs passes over this rank's stages.

    Args:
        mesh: The rank's place.
        schedule: The training schedule.
        stages_per_rank: Number of stages of each rank.
        device: The rank's device.
    """

    def __init__(
        self, mesh: Mesh, schedule: Schedule, stages_per_rank: int, device: torch.device
    ) -> None:
        self._mesh, self._schedule, self._device = mesh, schedule, device
        self._num_ranks = len(mesh.pipeline_ranks)
        self._num_stages = self._num_ranks * stages_per_rank
        self._passes: Cache[tuple[list[_Stage], Any]] = Cache(_CACHED_PASSES)
        self._connected = False
        self._work: Work

    def run(self, work: Work) -> None:
        """Runs all microbatches of ``work`` forward, and backward if it trains.

        Every rank of the pipeline calls it with the same batch. Gradients add up in ``.grad``.
        """
        self._work = work
        key = (work.trains, torch.is_inference_mode_enabled(), work.num_microbatches, work.key)
        stages, schedule = self._passes.get(key, lambda: self._build(work))
        for stage in stages:
            stage.body.work = work
        try:
            # Each last stage gets the numbers of its microbatches as torch's loss targets.
            targets = torch.arange(work.num_microbatches) if self._mesh.is_last else None
            schedule.step(target=targets, return_outputs=False)
            if stages[0].sends is not None:
                stages[0].sends.finish()
            self._connected = True
        except BaseException:
            self._passes.forget(key)  # it keeps half of a pass
            raise
        finally:
            del self._work  # a cached pass must not keep a batch alive
            for stage in stages:
                stage.clear_runtime_states()
                del stage.body.work

    def clear(self) -> None:
        """Forgets all stages and their buffers."""
        self._passes.clear()

    def _build(self, work: Work) -> tuple[list[_Stage], Any]:
        stages = [self._build_stage(index, work) for index in self._mesh.stages]
        if not work.trains:
            return stages, self._forward_only(stages, work.num_microbatches)
        kind = torch_schedules.get_schedule_class(self._schedule.name)
        kwargs = {"loss_fn": self._scaled_loss, "scale_grads": False}
        if not self._schedule.is_single:
            sizes = (self._num_ranks, len(stages), work.num_microbatches)
            sends = Sends(
                action_lists(self._schedule, *sizes),
                torch_schedules._batch_p2p,
                torch_schedules._wait_batch_p2p,
            )
            for stage in stages:
                stage.sends = sends
        given = stages[0] if self._schedule.is_single else stages
        return stages, kind(given, work.num_microbatches, **kwargs)

    def _build_stage(self, index: int, work: Work) -> _Stage:
        def boundary(stage: int) -> list[list[TensorMeta]]:
            if stage == 0:
                return [[] for _ in range(work.num_microbatches)]
            if stage == self._num_stages:  # the loss, which goes nowhere
                return [[TensorMeta((), torch.float32, True)]] * work.num_microbatches
            return [work.boundary(stage, m) for m in range(work.num_microbatches)]

        received, sent = boundary(index), boundary(index + 1)
        group = self._mesh.pipeline_group
        sizes = index, self._num_stages
        return _Stage(*sizes, received, sent, self._device, group, self._connected)

    def _scaled_loss(self, loss: Tensor, target: Tensor) -> Tensor:
        # Not in place and never the loss itself, which split backward detaches.
        return loss * self._work.loss_factor(int(target))

    def _forward_only(self, stages: list[_Stage], num_microbatches: int) -> Any:
        """Breadth-first forward of all stages: torch's own lowering of an order without backward.

        torch validates that a schedule has backwards, and its ``eval()`` asserts on V placements;
        so the backwards are listed, then taken out with their messages.
        """
        forward = torch_schedules._ComputationType.FORWARD
        backward = torch_schedules._ComputationType.FULL_BACKWARD
        microbatches = range(num_microbatches)
        actions: dict[int, list[torch_schedules._Action | None]] = {}
        for rank in range(self._num_ranks):
            held = self._schedule.stages_of_rank(rank, self._num_ranks, len(stages))
            ahead = [(s, forward, m) for s in sorted(held) for m in microbatches]
            back = [(s, backward, m) for s in sorted(held, reverse=True) for m in microbatches]
            actions[rank] = [torch_schedules._Action(*action) for action in ahead + back]
        runtime = torch_schedules._PipelineScheduleRuntime(
            stages, num_microbatches, loss_fn=None, scale_grads=False
        )
        runtime._prepare_schedule_with_comms(actions)
        kept = {
            forward,
            torch_schedules._ComputationType.SEND_F,
            torch_schedules._ComputationType.RECV_F,
        }
        for rank, lowered in runtime.pipeline_order_with_comms.items():
            runtime.pipeline_order_with_comms[rank] = [
                action for action in lowered if action.computation_type in kept
            ]
        return runtime
