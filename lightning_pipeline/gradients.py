"""Gradients between the schedule and the optimizer: parked, completed over both axes, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline import transfers
from lightning_pipeline.errors import StepError
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting.torch_private import divide_each

BUCKET_BYTES = 25 * 2**20  # as in torch's DistributedDataParallel


class Parking:
    """Keeps a step's gradients out of the way of ``zero_grad``.

    Lightning's closure runs the step, then ``zero_grad``, then ``backward``. The schedule makes
    the gradients already in the step, so they wait here until ``backward``.
    """

    def __init__(self) -> None:
        self._old: list[tuple[nn.Parameter, Tensor]] = []
        self._new: list[tuple[nn.Parameter, Tensor]] = []

    def clear_for_step(self, parameters: Sequence[nn.Parameter], keep_old: bool) -> None:
        """Takes the gradients of the last optimizer step away.

        Args:
            parameters: The optimizer's parameters.
            keep_old: Whether a hook before or in ``zero_grad`` wants to see them.
        """
        self._old = [(p, p.grad) for p in parameters if keep_old and p.grad is not None]
        for parameter in parameters:
            parameter.grad = None

    def park(self, parameters: Sequence[nn.Parameter]) -> None:
        """Takes the step's own gradients away and puts the old ones back."""
        self._new = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        for parameter, grad in self._old:
            parameter.grad = grad
        self._old = []

    def hand_back(self, complete: Callable[[], None]) -> None:
        """Puts the parked gradients in place, lets them be completed, adds what was left there."""
        left = [(p, p.grad) for p, _ in self._new if p.grad is not None]
        for parameter, grad in self._new:
            parameter.grad = grad
        self._new = []
        complete()
        for parameter, grad in left:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class _Bucket:
    """Some gradients on their way over an axis, as one message.

    A parameter without a gradient on any rank must stay without one (an optimizer skips it), so
    the ranks that have one are counted: in the message where that is on the host, which can read
    it, else in one of its own.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._grads = [p.grad for p in parameters]
        if any(grad is not None and grad.layout is not torch.strided for grad in self._grads):
            raise StepError(
                "An embedding with sparse=True has a sparse gradient, which ranks that hold the "
                "same weight cannot exchange here. Set sparse=False, or data_parallel_size=1 (and "
                "use the embedding on one stage alone)."
            )
        flat = [
            (torch.zeros_like(p) if grad is None else grad).reshape(-1)
            for p, grad in zip(parameters, self._grads, strict=True)
        ]
        counts = torch.from_numpy(np.array([float(grad is not None) for grad in self._grads]))
        self._counting: Any = None
        if transfers.is_host(flat[0].device):
            flat.append(counts.to(flat[0].dtype))
        else:
            self._counting = dist.all_reduce(counts, group=group, async_op=True)
        self._counts, self._message = counts, torch.cat(flat)
        self._rest = 0 if self._counting else len(counts)
        self._handle = dist.all_reduce(self._message, group=group, async_op=True)

    def finish(self, divisor: float) -> None:
        """Waits and writes the sum over the ranks, divided by ``divisor``, into the gradients."""
        self._handle.wait()
        *means, counts = self._message.split([*(p.numel() for p in self._parameters), self._rest])
        if self._counting is not None:
            self._counting.wait()
            counts = self._counts
        present = counts.tolist()
        for parameter, grad, mean, count in zip(
            self._parameters, self._grads, means, present, strict=True
        ):
            mean = mean.div_(divisor).view_as(parameter)
            if grad is not None:
                grad.copy_(mean)
            elif count:
                parameter.grad = mean.clone()


class GradientReducer:
    """Completes gradients once per optimizer step.

    If a hook sees them after every pass, those of shared parameters are summed after every pass:
    else it would see parts, and what it adds to them would be summed too.

    A parameter that several ranks of a pipeline hold (tied weights, the step's own parameters)
    gets the sum over them, and every parameter the mean over the replicas. Where the step weighs
    its losses itself, the mean is over the weights of all microbatches that were accumulated and
    of all replicas. The replicas' exchange of a stage starts as soon as its last weight gradient
    is there.

    Args:
        mesh: The rank's place, groups built.
        held: Parameters that need gradients, by stage that this rank holds.
        shared: Parameters that several stages hold, on this rank: for every set of stages, in an
            order that is the same on all ranks, the group of the ranks that hold it (``None``
            where this is one rank) and the parameters by name.
    """

    def __init__(
        self,
        mesh: Mesh,
        held: dict[int, list[nn.Parameter]],
        shared: list[tuple[dist.ProcessGroup | None, list[nn.Parameter]]],
    ) -> None:
        self._mesh, self._shared = mesh, shared
        late = {id(p) for _, parameters in shared for p in parameters}
        self._own = {
            stage: [p for p in parameters if id(p) not in late]
            for stage, parameters in held.items()
        }
        # Replicas must exchange in one order; a backward ends on high stages first.
        self._waiting = sorted(held, reverse=True)
        self._order = list(self._waiting)
        self._finished: set[int] = set()
        self._buckets: list[_Bucket] = []
        self._weights: list[float | None] = []
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self.armed = self._sums = False

    def arm(self, first_pass: bool, last_pass: bool, sums: bool = False) -> None:
        """Announces a pass; only the last one before an optimizer step exchanges gradients.

        Args:
            first_pass: Whether it is the first since the last optimizer step.
            last_pass: Whether it is the last before the next one.
            sums: Whether gradients of shared parameters are to be whole after each pass.
        """
        self.armed, self._sums = last_pass, sums or last_pass
        if first_pass or sums:  # what is there has been summed, or is none of the optimizer's
            several = [p for group, parameters in self._shared if group for p in parameters]
            self._before = [(p, p.grad) for p in several if p.grad is not None]
            for parameter in several:
                parameter.grad = None
        if first_pass:
            self._weights = []
        self._waiting, self._finished, self._buckets = list(self._order), set(), []

    def finished(self, stage: int) -> None:
        """All weight gradients of ``stage`` are there: start its exchange if its turn has come."""
        self._finished.add(stage)
        while self.armed and self._waiting and self._waiting[0] in self._finished:
            self._start(self._own[self._waiting.pop(0)])

    def weigh(self, weight: float | None) -> None:
        """Notes the weight that the step gave to a pass, ``None`` if it gave none.

        Raises:
            StepError: If it gave one to some of the passes before one optimizer step only.
        """
        self._weights.append(weight)
        if any((w is None) != (weight is None) for w in self._weights):
            raise StepError(
                "training_step returned a 'weight' for some of the batches that are accumulated "
                "and none for others. Return it always, or never."
            )

    def _divisor(self) -> float:
        """What the sum of the gradients over microbatches and replicas is divided by."""
        size = self._mesh.sizes.data
        if not self._weights or self._weights[0] is None:
            return float(size)  # the losses are scaled already
        total = np.array([sum(w for w in self._weights if w is not None)])
        if size > 1:
            dist.all_reduce(torch.from_numpy(total), group=self._mesh.data_group)
        return float(total[0]) or 1.0  # nothing counts: the gradients are zeros

    def complete(self) -> None:
        """Waits for all exchanges; call with the gradients in their places."""
        if self._sums:
            self._sum()
        if not self.armed:
            return
        for _, parameters in self._shared:
            self._start(parameters)
        divisor = self._divisor()
        for bucket in self._buckets:
            bucket.finish(divisor)
        if self._mesh.sizes.data == 1 and divisor != 1.0:
            lists = [*self._own.values(), *(parameters for _, parameters in self._shared)]
            grads = [p.grad for parameters in lists for p in parameters if p.grad is not None]
            if grads:
                divide_each(grads, divisor)
        self._buckets, self.armed = [], False

    def _sum(self) -> None:
        """Sums gradients over the stages, and adds what they were before."""
        for group, parameters in self._shared:
            if group is not None:
                for bucket in _buckets([p for p in parameters if p.requires_grad]):
                    _Bucket(bucket, group).finish(1.0)
        for parameter, grad in self._before:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._before = []

    def _start(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._mesh.sizes.data > 1:
            for bucket in _buckets([p for p in parameters if p.requires_grad]):
                self._buckets.append(_Bucket(bucket, self._mesh.data_group))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Groups parameters of one dtype up to BUCKET_BYTES."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        if bucket and (parameter.dtype != bucket[0].dtype or size + nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield bucket
