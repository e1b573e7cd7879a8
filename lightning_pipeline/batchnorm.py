"""BatchNorm whose statistics are those of all replicas of the pipeline.

Lightning's own conversion, and a plain `torch.nn.SyncBatchNorm`, synchronise over all ranks; but
ranks of one pipeline hold different layers. So each layer meets its copies in the other replicas,
once in the forward and once in the backward of a microbatch. All replicas do the same work in the
same order, so they meet as long as their batches have equally many rows, which samplers see to.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipeline.mesh import Mesh, Scope


class _Gathered(torch.autograd.Function):
    """Rows of all members of a group; the gradient of a row is the sum of what they all make."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row.contiguous(), group)
        return torch.stack(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


class _Synchronised(_BatchNorm):
    """What a BatchNorm becomes for a run; its class alone is changed, so that it stays itself."""

    mesh: Mesh

    def forward(self, x: Tensor) -> Tensor:
        """Normalises by the statistics of all replicas while training.

        Args:
            x: Of shape [rows, channels, ...].
        """
        alone = self.mesh.scope is Scope.ALONE or self.mesh.sizes.data == 1
        if alone or not self.training:
            return _BatchNorm.forward(self, x)
        self._check_input_dim(x)
        dims = [dim for dim in range(x.ndim) if dim != 1]
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var, count = self._statistics(exact, dims)
        if self.track_running_stats:
            self._keep(mean.detach(), var.detach() * (count / (count - 1)))
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        out = (exact - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    def _statistics(self, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of each channel over all replicas, and the number of values."""
        mean = x.mean(dims)
        spread = (x - mean.view([-1 if d == 1 else 1 for d in range(x.ndim)])).square().sum(dims)
        count = mean.new_full((1,), x.numel() / x.shape[1])
        rows = _Gathered.apply(torch.cat([mean, spread, count]), self.mesh.data_group)
        means, spreads, counts = cast(Tensor, rows).split([len(mean), len(mean), 1], dim=1)
        total = counts.detach().sum()
        mean = (means * counts.detach()).sum(0) / total
        # The parallel algorithm of Chan, Golub and LeVeque (1979): nothing large is subtracted.
        between = ((means - mean).square() * counts.detach()).sum(0)
        return mean, (spreads.sum(0) + between) / total, total

    @torch.no_grad()
    def _keep(self, mean: Tensor, unbiased: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
        for kept, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            kept.mul_(1.0 - share).add_(share * value.to(kept.dtype))


def synchronise(module: nn.Module, mesh: Mesh, everything: bool) -> list[tuple[nn.Module, type]]:
    """Makes BatchNorms meet their copies in other replicas.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
        everything: Whether to change every BatchNorm, or only a SyncBatchNorm of the user's.

    Returns:
        The changed modules with their classes, for :func:`restore`.
    """
    changed: list[tuple[nn.Module, type]] = []
    for child in module.modules():
        kind = type(child)
        if isinstance(child, nn.SyncBatchNorm) or (everything and isinstance(child, _BatchNorm)):
            # The name is in splitting.cost.WHOLE_CLASSES: a recording would not synchronise.
            changed.append((child, kind))
            child.__class__ = type("ReplicatedBatchNorm", (_Synchronised, kind), {"mesh": mesh})
    return changed


def restore(changed: list[tuple[nn.Module, type]]) -> None:
    """Takes back what :func:`synchronise` changed."""
    for child, kind in changed:
        child.__class__ = kind
    changed.clear()
