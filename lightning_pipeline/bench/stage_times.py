"""How long the parts of a chain take on each rank while all ranks work: a subject among others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.bench.harness import Steps, spread
from lightning_pipeline.bench.models import Chain, Model, cuts, sgd
from lightning_pipeline.simulate import StageTime

PARTS = 2
"""Parts of a rank that are timed; a stage is one of them or both."""


class StageTimes(Steps):
    """A subject whose step times one microbatch of this rank's parts, without any message.

    Args:
        model: The model.
        num_blocks: Its blocks.
        batch: A batch of inputs and targets.
        microbatches: How many microbatches it is cut into.
    """

    def __init__(
        self, model: Model, num_blocks: int, batch: tuple[Tensor, Tensor], microbatches: int
    ) -> None:
        super().__init__(self._step)
        rank, self._ranks = dist.get_rank(), dist.get_world_size()
        chain, bounds = model.chain(num_blocks), cuts(num_blocks, PARTS * self._ranks)
        inputs, targets = (t.chunk(microbatches)[0] for t in batch)
        mine = range(PARTS * rank, PARTS * rank + PARTS)
        self._parts = []
        value: Tensor = inputs
        for part in range(PARTS * self._ranks):
            stage = chain.net[bounds[part] : bounds[part + 1]]
            if part in mine:
                target = targets if part == PARTS * self._ranks - 1 else None
                self._parts.append(_Part(stage, model, value, target))
            with torch.no_grad():
                value = stage(value)
        self._optimizer = _optimizer(chain, bounds[mine[0]], bounds[mine[-1] + 1])
        self._optimizer_seconds: list[float] = []

    def _step(self) -> None:
        for part in self._parts:
            part.measure()
        self._optimizer_seconds.append(_timed(self._optimizer.step)[0])

    def medians(self) -> tuple[list[StageTime], float]:
        """Median CPU seconds of every part in order, and of the slowest rank's optimizer."""
        own = [part.median() for part in self._parts], spread(self._optimizer_seconds).median
        every: list[Any] = [None] * self._ranks
        dist.all_gather_object(every, own)
        return [time for times, _ in every for time in times], max(o for _, o in every)


class _Part:
    """Some blocks with what they receive; ``target`` for the last ones of a model only."""

    def __init__(self, stage: Any, model: Model, value: Tensor, target: Tensor | None) -> None:
        self._stage, self._loss, self._target = stage, model.loss, target
        self._value = value.detach().requires_grad_(value.is_floating_point())
        self._grad = torch.ones_like(self._forward())
        self._seconds: list[tuple[float, float, float]] = []

    def _forward(self) -> Tensor:
        out: Tensor = self._stage(self._value)
        return out if self._target is None else self._loss(out, self._target)

    def measure(self) -> None:
        forward, out = _timed(self._forward)
        inputs, value = 0.0, self._value
        if value.requires_grad:
            inputs, _ = _timed(lambda: torch.autograd.grad(out, value, self._grad))
        out = self._forward()
        both, _ = _timed(lambda: out.backward(self._grad))
        self._seconds.append((forward, inputs, both))

    def median(self) -> StageTime:
        columns = zip(*self._seconds, strict=True)
        forward, inputs, both = (spread(column).median for column in columns)
        return StageTime(forward, inputs, max(0.0, both - inputs))


def _optimizer(chain: Chain, low: int, high: int) -> torch.optim.Optimizer:
    """The optimizer of blocks ``low`` to ``high``, with gradients of zero."""
    parameters = list(chain.net[low:high].parameters())
    optimizer = sgd(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return optimizer


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    found = function()
    return time.thread_time() - start, found
