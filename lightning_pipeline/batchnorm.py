"""Norms with running statistics: over all replicas of the pipeline, and of whole batches.

A norm sees one microbatch at a time and one replica. For a run its class alone is changed, so that
it stays itself:

- Synchronised, it normalises by the statistics of all replicas. Lightning's own conversion, and a
  plain `torch.nn.SyncBatchNorm`, synchronise over all ranks; but ranks of one pipeline hold
  different layers. So each layer meets its copies in the other replicas, once in the forward and
  once in the backward of a microbatch. All replicas do the same work in the same order, so they
  meet as long as their batches have equally many rows, which samplers see to.
- Deferred, it normalises a microbatch as ever, but its running statistics move once a batch, by
  the mean and variance of all microbatches together (torchgpipe's DeferredBatchNorm; Kim et al.
  2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_pipeline.mesh import Mesh, Scope
from lightning_pipeline.splitting.torch_private import (
    BatchNormBase,
    InstanceNormBase,
    dims_without_batch,
)

_microbatch: ContextVar[int | None] = ContextVar("microbatch", default=None)
_FORWARDS = (BatchNormBase.forward, nn.SyncBatchNorm.forward, InstanceNormBase.forward)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def counting(microbatch: int) -> Iterator[None]:
    """The forward of a microbatch that counts, unlike a filler and a recomputation."""
    token = _microbatch.set(microbatch)
    try:
        yield
    finally:
        _microbatch.reset(token)


def names_of_norms(module: nn.Module) -> list[str]:
    """Dotted names of the BatchNorms that normalise by what they get while ``module`` trains."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        if not module.training:
            module.train()  # which may leave some of them frozen
        return [n for n, m in module.named_modules() if isinstance(m, BatchNormBase) and m.training]
    finally:
        for child, training in modes:
            child.training = training


def normalises_batches(module: nn.Module) -> bool:
    """Whether a BatchNorm normalises by what it gets in the mode that the module is in."""
    norms = (child for child in module.modules() if isinstance(child, BatchNormBase))
    return any(norm.training or norm.running_mean is None for norm in norms)


def meets_replicas(module: nn.Module) -> bool:
    """Whether a norm that is changed for a run takes statistics over all replicas."""
    return any(isinstance(child, _Synchronised) and child.training for child in module.modules())


class Moments(NamedTuple):
    """What a norm saw in one call.

    Attributes:
        size: Number of values in a channel, or of instances.
        mean: Their mean, of shape [channels].
        var: Of a BatchNorm the biased variance; of an InstanceNorm the mean of the instances'
            unbiased ones, of shape [channels].
    """

    size: Tensor
    mean: Tensor
    var: Tensor


class Norms:
    """The norms of one LightningModule that are changed for a run.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
        synchronises: Whether every BatchNorm is synchronised, or only a SyncBatchNorm of the
            user's.
        defers: Whether running statistics are those of whole batches.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, synchronises: bool = False, defers: bool = False
    ) -> None:
        self.mesh, self.defers = mesh, defers
        self._module, self._synchronises = module, synchronises
        self._changed: list[tuple[nn.Module, type]] = []
        self._seen: dict[_ForRun, dict[int, list[Moments]]] = {}
        self.change()

    def change(self) -> None:
        """Changes the norms that are not changed yet; a lazy one when it is lazy no more."""
        for child in self._module.modules():
            if isinstance(child, (_ForRun, LazyModuleMixin)):
                continue
            is_batch_norm = isinstance(child, BatchNormBase)
            if isinstance(child, nn.SyncBatchNorm) or (self._synchronises and is_batch_norm):
                self._change(child, _Synchronised)
            elif self.defers and isinstance(child, (BatchNormBase, InstanceNormBase)):
                self._change(child, _Deferred)

    def _change(self, child: nn.Module, base: type) -> None:
        kind = type(child)
        if kind.forward not in _FORWARDS:
            raise MisconfigurationException(
                f"sync_batchnorm and deferred_batch_norm take over the forward of a norm, but "
                f"{kind.__module__}.{kind.__qualname__} has one of its own, which would be lost or "
                "measured wrongly. Call a plain torch.nn.BatchNorm2d and do the rest around it, or "
                "set sync_batchnorm=False and deferred_batch_norm=False."
            )
        # Its own name, for summaries; that it stays whole is said to recordings apart.
        names = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
        own = {"_norms": self, "_own_class": kind}
        child.__class__ = type(kind.__name__, (base, kind), {**names, **own})
        self._changed.append((child, kind))

    def restore(self) -> None:
        """Gives the norms their classes back."""
        for child, kind in self._changed:
            child.__class__ = kind
        self._changed.clear()
        self._seen.clear()

    def keep(self, norm: _ForRun, seen: Moments) -> None:
        """Moves a norm's running statistics by what it saw, now or at the end of the batch."""
        if not self.defers or self.mesh.scope is not Scope.REPLICAS:
            _move(norm, seen)
        elif (microbatch := _microbatch.get()) is not None:
            self._seen.setdefault(norm, {}).setdefault(microbatch, []).append(seen)

    def end_batch(self) -> None:
        """Moves the running statistics that waited for the end of the batch.

        A norm that is called several times in a microbatch moves as often, as on one device.
        """
        for norm, microbatches in self._seen.items():
            for call in range(max(map(len, microbatches.values()))):
                seen = [calls[call] for calls in microbatches.values() if call < len(calls)]
                _move(norm, _joined(norm, seen))
        self._seen.clear()


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


class _ForRun(nn.Module):
    """What a norm becomes for a run."""

    stays_whole = True  # for splitting.cost: a recording of its inside would keep nothing
    _norms: Norms
    _own_class: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy, here or in another process, is of the user's class: it has no part in the run.
        kind = type(self)
        object.__setattr__(self, "__class__", self._own_class)
        try:
            function, args, *rest = self.__reduce_ex__(protocol)
            return _called, (function, args), *rest  # pickle compares classes behind __newobj__
        finally:
            object.__setattr__(self, "__class__", kind)


class _Deferred(_ForRun):
    """A norm that normalises as ever and leaves its running statistics for later."""

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``input``, of shape [rows, channels, ...] or of one that its class allows."""
        kept = {key: self._buffers.get(key) for key in _STATISTICS}
        in_step = self._norms.mesh.scope is Scope.REPLICAS
        if not (self.training and in_step and kept["running_mean"] is not None):
            return super().forward(input)
        # Copies take what the layer writes.
        self._buffers.update({k: b.clone() for k, b in kept.items() if b is not None})
        try:
            out = super().forward(input)
        finally:
            self._buffers.update(
                {key: buffer for key, buffer in kept.items() if buffer is not None}
            )
        self._norms.keep(self, _measured(self, input.detach()))
        return out


class _Synchronised(_ForRun, BatchNormBase):
    """A BatchNorm that meets its copies in the other replicas."""

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the statistics of all replicas while training.

        Args:
            input: Of shape [rows, channels, ...].
        """
        x = input  # torch's name, by which it may be given
        mesh = self._norms.mesh
        alone = mesh.sizes.data == 1 and not self._norms.defers
        if alone or mesh.scope is Scope.ALONE or not self.training:
            return BatchNormBase.forward(self, x)
        self._check_input_dim(x)
        dims = [dim for dim in range(x.ndim) if dim != 1]
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var, count = self._statistics(exact, dims)
        if self.track_running_stats:
            self._norms.keep(self, Moments(count, mean.detach(), var.detach()))
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
        rows = _Gathered.apply(torch.cat([mean, spread, count]), self._norms.mesh.data_group)
        means, spreads, counts = cast(Tensor, rows).split([len(mean), len(mean), 1], dim=1)
        total = counts.detach().sum()
        mean = (means * counts.detach()).sum(0) / total
        # The parallel algorithm of Chan, Golub and LeVeque (1979): nothing large is subtracted.
        between = ((means - mean).square() * counts.detach()).sum(0)
        return mean, (spreads.sum(0) + between) / total, total


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


def _measured(norm: nn.Module, x: Tensor) -> Moments:
    """What ``norm`` sees in ``x``."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(norm, InstanceNormBase):
        x = x.unsqueeze(0) if x.dim() == dims_without_batch(norm) else x
        var, mean = torch.var_mean(x.flatten(2), 2)
        return Moments(mean.new_full((), len(x)), mean.mean(0), var.mean(0))
    var, mean = torch.var_mean(x, [dim for dim in range(x.dim()) if dim != 1], correction=0)
    return Moments(mean.new_full((), x.numel() / x.shape[1]), mean, var)


def _joined(norm: nn.Module, parts: list[Moments]) -> Moments:
    """What ``norm`` would have seen in all parts together."""
    counts, means, variances = (torch.stack(values) for values in zip(*parts, strict=True))
    counts = counts.unsqueeze(1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    if not isinstance(norm, InstanceNormBase):
        variances = variances + (means - mean).square()
    return Moments(total, mean, (variances * counts).sum(0) / total)


@torch.no_grad()
def _move(norm: Any, seen: Moments) -> None:
    """Moves the running statistics of ``norm`` as torch does."""
    share, var = norm.momentum, seen.var
    if isinstance(norm, InstanceNormBase):
        share = share or 0.0
    else:
        norm.num_batches_tracked.add_(1)
        share = share if share is not None else 1.0 / norm.num_batches_tracked
        var = var * (seen.size / (seen.size - 1))
    for kept, value in ((norm.running_mean, seen.mean), (norm.running_var, var)):
        kept.mul_(1.0 - share).add_(share * value.to(kept.dtype))
