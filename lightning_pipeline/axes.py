"""What Lightning asks of the ranks, answered along the right axis."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.hooks import seeds_workers
from lightning_pipeline.lightning_private import deals_out_data
from lightning_pipeline.meeting import meet
from lightning_pipeline.mesh import Mesh, Scope, control_device, with_host
from lightning_pipeline.reporting import has_timed_out


class AxesStrategy(DDPStrategy):
    """A DDPStrategy whose replicas are whole pipelines.

    Data is dealt out to replicas and values are reduced over them; decisions are taken by all
    ranks together.
    """

    _mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands; known once the processes are connected."""
        assert self._mesh is not None, "the processes are not connected yet"
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.sizes.data, "rank": self.mesh.data_rank}

    def _deal_out(self, trainer: pl.Trainer) -> None:
        """Leaves data and logs to the user where there is one pipeline, as on one device."""
        if self.mesh.sizes.data == 1:
            # Lightning's injected DistributedSampler always shuffles in training.
            deals_out_data(trainer, False)
            # There is nobody to synchronise with.
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self.log\(.*sync_dist=True"
            )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        # Lightning seeds workers from the global rank right after this; ranks of one pipeline must
        # draw the same augmentation. Without a seed they agree through the main process' generator.
        if seeds_workers() and getattr(dataloader, "worker_init_fn", 0) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.mesh.data_rank)
        for holder in (dataloader, getattr(dataloader, "batch_sampler", None)):
            sampler = getattr(holder, "sampler", None)
            if type(sampler) is DistributedSampler:
                self._deal_to_replicas(sampler)
        return dataloader

    def _deal_to_replicas(self, sampler: DistributedSampler[Any]) -> None:
        """A sampler of the user's that deals to all ranks, its default, deals to replicas."""
        if sampler.num_replicas != self.world_size or self.mesh.sizes.pipeline == 1:
            return
        epoch = sampler.epoch
        DistributedSampler.__init__(
            sampler,
            sampler.dataset,
            **self.distributed_sampler_kwargs,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        sampler.set_epoch(epoch)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        environment, server = self.cluster_environment, None
        if environment is not None and not dist.is_initialized():
            timeout = self._timeout or default_pg_timeout
            place = environment, self.global_rank, self.world_size
            server = meet(*place, self.num_nodes == 1, timeout)
        try:
            super().setup_distributed()
        except dist.DistError as error:
            if not has_timed_out(error):
                raise
            raise PipelineError(
                f"Rank {self.global_rank} has waited for the others to start for longer than "
                f"timeout={self._timeout} of the strategy, which their start must fit into. Set a "
                "longer PipelineStrategy(timeout=timedelta(minutes=5)), or see what they say."
            ) from error
        del server  # the process group has it now

    @override
    def _get_process_group_backend(self) -> str:
        # Numbers of the host are compared and decided on without a wait for the device.
        return with_host(super()._get_process_group_backend())

    # Inside a step the ranks of one pipeline are at different lines: only replicas can meet, and
    # while a step is observed nobody can.

    def extent(self, number: int, alone: bool = False) -> tuple[int, int]:
        """The smallest and the largest number that ranks give; all of them call it.

        Args:
            number: This rank's.
            alone: Whether each pipeline asks for itself.
        """
        group = self.mesh.pipeline_group if alone else None
        words = torch.tensor([number, -number], device=control_device(group, self.root_device))
        dist.all_reduce(words, dist.ReduceOp.MIN, group)
        least, most = words.tolist()
        return least, -most

    def gather(self, value: Any, alone: bool = False) -> dict[int, Any]:
        """What each rank gives, by its number; all of them call it.

        Args:
            value: This rank's, small.
            alone: Whether each pipeline asks for itself.
        """
        pairs: list[Any] = [None] * len(self._ranks(alone))
        group = self.mesh.pipeline_group if alone else None
        dist.all_gather_object(pairs, (self.global_rank, value), group)
        return dict(pairs)

    def _ranks(self, alone: bool) -> Sequence[int]:
        return self.mesh.pipeline_ranks if alone else range(self.world_size)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor) and self._is_alone(group):
            copies = self.mesh.sizes.data
            return tensor * (copies if _is_sum(reduce_op) else 1)
        if self._is_world(group) and self.mesh.sizes.data == 1:
            return tensor  # as on one device
        if self._is_world(group) and isinstance(tensor, Tensor):
            return _reduced(tensor, self.mesh.data_group, reduce_op)
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._is_world(group) and self.mesh.sizes.data == 1:
            return tensor  # as on one device
        if self._is_alone(group):
            return torch.stack([tensor if sync_grads else tensor.detach()] * self.mesh.sizes.data)
        return super().all_gather(tensor, self._over_replicas(group), sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._mesh is None or self.mesh.scope is Scope.ALL:
            super().barrier(*args, **kwargs)
        elif self.mesh.scope is Scope.REPLICAS:
            dist.barrier(self.mesh.data_group)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if self._mesh is None or self.mesh.scope is Scope.ALL:
            return super().broadcast(obj, src)
        if self.mesh.scope is Scope.ALONE:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, self.mesh.data_ranks[src], self.mesh.data_group)
        return box[0]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.mesh.scope is Scope.ALONE:
            return decision
        group = dist.group.WORLD if self.mesh.scope is Scope.ALL else self.mesh.data_group
        device = control_device(group, self.root_device)
        vote = torch.full((), int(decision), device=device)
        dist.all_reduce(vote, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group)
        return bool(vote)

    def _is_world(self, group: Any) -> bool:
        return group in (None, dist.group.WORLD)

    def _is_alone(self, group: Any) -> bool:
        return self._is_world(group) and self.mesh.scope is Scope.ALONE

    def _over_replicas(self, group: Any) -> Any:
        return self.mesh.data_group if self._is_world(group) else group


def _reduced(tensor: Tensor, group: dist.ProcessGroup, reduce_op: Any) -> Tensor:
    """As Lightning's, in place, but for its barrier: there the host waits for the device."""
    means = str(reduce_op).lower() in ("mean", "avg")
    if isinstance(reduce_op, str):
        reduce_op = dist.ReduceOp.SUM if means else getattr(dist.ReduceOp, reduce_op.upper())
    dist.all_reduce(tensor, reduce_op, group)
    if not means:
        return tensor
    size = dist.get_world_size(group)
    return tensor.div_(size) if tensor.is_floating_point() else tensor.copy_(tensor / size)


def _is_sum(reduce_op: Any) -> bool:
    return reduce_op == dist.ReduceOp.SUM or str(reduce_op).lower() == "sum"
