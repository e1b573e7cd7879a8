"""The first training step of a fit beside an unpipelined one: ``validate="first_step"``.

Every rank runs the step of the first batch, or of the batches that are accumulated into the first
optimizer step, by itself with copies of all weights, and keeps the gradients of what it holds. When
the pipeline's own are complete the two are compared, and rank 0 tells the largest difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_pipeline.batchnorm import meets_replicas, normalises_batches
from lightning_pipeline.differences import Difference, Rounding, apart, measure, rounding_of
from lightning_pipeline.mesh import Mesh, control_device
from lightning_pipeline.passes import StepPass
from lightning_pipeline.placing import Held, PlacedModule
from lightning_pipeline.splitting.torch_private import has_gradient_hooks
from lightning_pipeline.unpipelined import (
    Manner,
    MeetsReplicasError,
    Outcome,
    RunnerOf,
    Unpipelined,
    fetch,
    room,
)
from lightning_pipeline.wording import plural

_REPLICAS = (
    "the step or a synchronised BatchNorm meets the other replicas, which an unpipelined run on "
    "one rank cannot. Set data_parallel_size=1 to compare"
)
_LOOK = {
    Manner.WHOLE: (
        "A step sees one microbatch at a time. Look in it, and in its modules, for what mixes the "
        "rows of a batch: a contrastive loss, a sum or a mean over something else than samples "
        "(return {'loss': ..., 'weight': n}, see docs/means.md), statistics of the batch such as "
        "those of an own norm. Hooks that change gradients between accumulated batches show, too. "
        "PipelineStrategy(num_microbatches=1) leaves the batch whole where the schedule allows it"
    ),
    Manner.MICROBATCHES: (
        "Both saw the same microbatches. Look for state that a forward changes and reads again "
        "(BatchNorm's statistics in a loss, buffers, counters), for numbers that depend on the "
        "order of microbatches, and for hooks that change gradients"
    ),
    Manner.PARTS: (
        "Both saw the same microbatches and drew the same random numbers. Look for random sources "
        "that seed_everything does not know, for dropout or noise that depends on what ran before, "
        "for state that a forward changes and reads again, and for hooks that change gradients"
    ),
}


class _Told(NamedTuple):
    """What a rank tells the others.

    Attributes:
        worst: Its largest difference; ``None`` if it has no gradient.
        losses: The loss of the pipeline and of the reference.
        left_out: Names of parameters with gradient hooks.
    """

    worst: Difference | None
    losses: tuple[float, float]
    left_out: list[str]


class FirstStep:
    """The comparison of the first optimizer step of one fit.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
        device: The rank's device.
        context: The precision plugin's context of the training step.
        runner: Makes what runs a stage.
        is_wanted: Whether there is to be one.

    Attributes:
        is_over: Whether nothing is left to compare.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        device: torch.device,
        context: Callable[[], Any],
        runner: RunnerOf,
        is_wanted: bool,
    ) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._context = context
        self._run = Unpipelined(module, mesh, device, context, runner)
        self._outcomes: list[Outcome] = []
        self._losses: list[Tensor] = []
        self._accumulated, self._scale = 1, 1.0
        self.is_over = not is_wanted

    def skip(self, reason: str) -> None:
        """Gives the comparison up; all ranks do so together."""
        self.is_over, self._outcomes, self._losses = True, [], []
        self._say(f"is not compared with an unpipelined one: {reason}.")

    def run(self, work: StepPass, batch: Any, placed: PlacedModule) -> None:
        """Runs the step of one batch as without the pipeline; all ranks call it.

        Args:
            work: What the pipeline is about to run.
            batch: The whole batch.
            placed: Where the weights are.
        """
        self._accumulated, self._scale = work.accumulated, float(work.scale)
        if placed.began_without_weights:
            self.skip("the module was built without memory for its weights")
            return
        if self._mesh.sizes.data > 1 and meets_replicas(self._module):
            self.skip(_REPLICAS)
            return
        assert placed.placement is not None
        copies = self._together(lambda: room(self._module, self._device))
        if copies is None:
            return
        fetch(self._module, copies, placed.placement.holders, self._mesh)
        manner = self._outcomes[0].manner if self._outcomes else self._manner(work, placed)
        outcome = self._together(partial(self._run, work, batch, copies, manner))
        if outcome is not None:
            self._outcomes.append(outcome)

    def _manner(self, work: StepPass, placed: PlacedModule) -> Manner:
        plans = {id(m.plan): m.plan for m in work.microbatches}.values()
        writes = placed.writes or any(call.writes for plan in plans for call in plan.calls)
        alone = writes or normalises_batches(self._module)
        return Manner.MICROBATCHES if alone else Manner.WHOLE

    def note(self, loss: Tensor) -> None:
        """Notes the pipeline's loss of a batch."""
        if not self.is_over:
            self._losses.append(loss)

    def _together(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; ``None``, with the comparison given up, if it fails on a rank."""
        reason, found = None, None
        try:
            found = work()
        except MeetsReplicasError:
            reason = _REPLICAS
        except Exception as error:
            reason = _reason(self._mesh.global_rank, error)
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        first = next((told for told in reasons if told is not None), None)
        if first is not None:
            self.skip(first)
            return None
        return found

    def compare(self, held: Held) -> None:
        """Compares the gradients of the optimizer step when they are complete; all ranks call it.

        Args:
            held: What this rank holds.
        """
        if not self._outcomes:
            return
        rounding = rounding_of(self._module, self._device, self._context)
        found, left_out = self._differences(held)
        largest, *lost = self._largest(
            [
                max((d.size for d in found), default=0.0),
                float(any(d.overflows for d in found)),
                float(any(d.reference_overflows for d in found)),
            ]
        )
        noise = rounding.noise(largest)
        worst = max(found, key=lambda difference: difference.beyond(noise), default=None)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, _Told(worst, self._mean_losses(), left_out))
        manner = self._outcomes[0].manner
        self._outcomes, self._losses = [], []
        if any(lost) and self._scale != 1.0:
            where = "with and without the pipeline" if all(lost) else "without the pipeline alone"
            where = where if lost[1] else "in the pipeline alone"
            # The scale only becomes smaller if the pipeline's own gradients overflow.
            self.is_over = not lost[0]
            then = "nothing is compared" if self.is_over else "the next one is compared"
            self._say(f"overflows {where} at a loss scale of {self._scale:g}: {then}.")
            return
        self.is_over = True
        if self._mesh.global_rank == 0:
            self._tell(told, manner, rounding, noise)

    def _differences(self, held: Held) -> tuple[list[Difference], list[str]]:
        """Those of this rank's gradients, and the names of parameters that are left out."""
        found, left_out = [], []
        for name, stage, parameter, reference in self._pairs(held):
            if has_gradient_hooks(parameter):
                left_out.append(name)
            else:
                found.append(measure(name, stage, parameter.grad, reference, self._scale))
        return found, left_out

    def _pairs(self, held: Held) -> Iterator[tuple[str, int, nn.Parameter, Tensor]]:
        """Name, stage and reference of every parameter that this rank holds.

        The reference is the mean over the replicas and the batches.
        """
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        group = self._mesh.data_group if self._mesh.sizes.data > 1 else None
        weight = torch.tensor([sum(o.weight or 0.0 for o in self._outcomes)], dtype=torch.float64)
        weighted = self._outcomes[0].weight is not None
        if group is not None and weighted:
            dist.all_reduce(weight, group=group)
        divisor = (float(weight) or 1.0) if weighted else float(self._mesh.sizes.data)
        done: set[int] = set()
        for stage, parameters in held.parameters.items():
            for parameter in parameters:
                if not parameter.requires_grad or id(parameter) in done:
                    continue
                done.add(id(parameter))
                exact = torch.promote_types(parameter.dtype, torch.float32)
                total = torch.zeros(tuple(parameter.shape), dtype=exact)
                for outcome in self._outcomes:
                    if id(parameter) in outcome.gradients:
                        total += outcome.gradients[id(parameter)]
                if group is not None:
                    dist.all_reduce(total, group=group)
                yield names[id(parameter)], stage, parameter, total / divisor

    def _largest(self, numbers: list[float]) -> list[float]:
        """The largest over all ranks, number by number."""
        device = control_device(None, self._device)
        most = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def _mean_losses(self) -> tuple[float, float]:
        """Loss of the pipeline and of the reference over the batches of this replica."""
        weights = [1.0 if o.weight is None else o.weight for o in self._outcomes]
        total = sum(weights) or 1.0

        def mean(losses: Iterable[float]) -> float:
            pairs = zip(losses, weights, strict=True)
            return sum(loss * weight for loss, weight in pairs if weight) / total

        return mean(map(float, self._losses)), mean(o.loss for o in self._outcomes)

    def _tell(self, told: list[_Told], manner: Manner, rounding: Rounding, noise: float) -> None:
        found = [rank.worst for rank in told if rank.worst is not None]
        worst = max(found, key=lambda difference: difference.beyond(noise), default=None)
        own, reference = max((rank.losses for rank in told), key=lambda pair: apart(*pair))
        text = f"loss {own:.9g} and {reference:.9g}"
        if not (math.isfinite(own) or math.isfinite(reference)):
            text += ": neither is finite, and entries that are not in both are not compared"
        if worst is not None:
            text += (
                f"; largest difference of a gradient {worst.absolute:.2g}, "
                f"{worst.relative:.2g} of its largest entry, in {worst.name} "
                f"(stage {worst.stage})"
            )
        text += f"; rounding of {rounding.name} is expected, up to {rounding.expected:.2g}"
        left_out = sorted({name for rank in told for name in rank.left_out})
        if left_out:
            text += (
                f"; left out: {plural(len(left_out), 'parameter')} with gradient hooks, "
                f"{left_out[0]} first"
            )
        batch = plural(self._accumulated, "batch", "es")
        over = f" of {batch} each" if self._accumulated > 1 else ""
        self._say(f"beside an unpipelined one on {manner.value}{over}: {text}.")
        gradient = worst is not None and worst.beyond(noise) > rounding.expected
        if gradient or not apart(own, reference) <= rounding.expected:
            what = "loss" if worst is None or not gradient else f"gradient of {worst.name}"
            where = f" (stage {worst.stage})" if worst is not None and gradient else ""
            rank_zero_warn(
                f"The first training step is another one in the pipeline: the {what}{where} "
                f"differs far beyond the rounding of {rounding.name}, {text}. {_LOOK[manner]}."
            )

    def _say(self, text: str) -> None:
        if self._mesh.global_rank == 0:
            print(f"The first training step {text}", flush=True)


def _reason(rank: int, error: Exception) -> str:
    """Why a rank has no reference, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first
    if memory:
        return f"rank {rank} has no memory for the whole model and batch ({what})"
    return f"the step cannot run unpipelined on rank {rank} ({what})"
