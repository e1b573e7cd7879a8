"""What Lightning asks of the ranks, answered along the right axis."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_pipeline.hooks import seeds_workers
from lightning_pipeline.mesh import Mesh


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

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        # Lightning seeds workers from the global rank right after this; ranks of one pipeline must
        # draw the same augmentation. Without a seed they agree through the main process' generator.
        if seeds_workers() and getattr(dataloader, "worker_init_fn", 0) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.mesh.data_rank)
        return dataloader

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, self._over_replicas(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, self._over_replicas(group), sync_grads)

    def _over_replicas(self, group: Any) -> Any:
        return self.mesh.data_group if group in (None, dist.group.WORLD) else group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        vote = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote)
