"""A subject that trains a chain of blocks by hand on torch.distributed.pipelining."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_pipeline.bench.emulation import SleepingModel
from lightning_pipeline.bench.harness import Steps
from lightning_pipeline.bench.models import Chain, Loss, cuts, sgd
from lightning_pipeline.schedules import Schedule


class HandSteps(Steps):
    """What a user would write: stages of blocks, a schedule, an optimizer, no Trainer.

    Shapes are given to torch, so that it need not ask for them.

    Args:
        chain: The model; this rank keeps its stages of it.
        loss: Its loss.
        batches: Batches of inputs and targets, used again and again; the same on all ranks.
        schedule: The schedule.
        depth: Stages on a rank.
        microbatches: Number of microbatches.
        shapes: Meta tensors at the begin of each stage and at the end of the last; ``None``: found
            by a forward on meta tensors.
    """

    def __init__(
        self,
        chain: Chain | SleepingModel,
        loss: Loss,
        batches: Sequence[tuple[Tensor, Tensor]],
        schedule: Schedule,
        depth: int,
        microbatches: int,
        shapes: list[Tensor] | None = None,
    ) -> None:
        super().__init__(self._step)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        num_stages = ranks * depth
        bounds = cuts(len(chain.net), num_stages)
        shapes = shapes or _boundaries(chain.net, bounds, batches[0][0].chunk(microbatches)[0])
        held = schedule.stages_of_rank(rank, ranks, depth)
        self._parts = {i: chain.net[bounds[i] : bounds[i + 1]] for i in held}
        stages = [
            PipelineStage(
                part,
                index,
                num_stages,
                torch.device("cpu"),
                input_args=shapes[index],
                output_args=shapes[index + 1],
            )
            for index, part in self._parts.items()
        ]
        kind = get_schedule_class(schedule.name)
        given: Any = stages[0] if schedule.is_single else stages
        self._schedule: Any = kind(given, microbatches, loss_fn=loss)
        parameters = itertools.chain(*(part.parameters() for part in self._parts.values()))
        self._optimizer = sgd(parameters)
        self._first, self._last = 0 in held, num_stages - 1 in held
        self._batches = itertools.cycle(batches)

    def _step(self) -> None:
        inputs, targets = next(self._batches)
        args = (inputs,) if self._first else ()
        kwargs = {"target": targets, "losses": []} if self._last else {}
        self._optimizer.zero_grad()
        self._schedule.step(*args, **kwargs, return_outputs=False)
        self._optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters under their names in the whole chain."""
        parts = self._parts.values()  # slices keep the names of their blocks
        return {f"net.{name}": p for part in parts for name, p in part.named_parameters()}


def _boundaries(net: nn.Sequential, bounds: list[int], microbatch: Tensor) -> list[Tensor]:
    """Meta tensors at the begin of each stage and at the end."""
    value = microbatch.to("meta")
    found = [value]
    for low, high in itertools.pairwise(bounds):
        value = copy.deepcopy(net[low:high]).to("meta")(value)
        found.append(value.detach().requires_grad_())
    return found
