"""The first training step of a fit beside an unpipelined one: ``validate="first_step"``.

Every rank runs the step of the first batch, or of the batches that are accumulated into the first
optimizer step, by itself with copies of all weights, and keeps the gradients of what it holds. When
the pipeline's own are complete the two are compared, and rank 0 tells the largest difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_pipeline.batchnorm import meets_replicas, normalises_batches
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

_NOISE = 4.0  # a gradient that is zero but for rounding, in roundings of the largest one
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


class Rounding(NamedTuple):
    """How exactly a step computes.

    Attributes:
        name: Its coarsest floating-point type.
        eps: Distance from 1 to the next number of it.
    """

    name: str
    eps: float

    @property
    def expected(self) -> float:
        """Relative differences that its rounding may make: half of its digits are lost."""
        return math.sqrt(self.eps)


def rounding_of(module: nn.Module, device: torch.device, context: Callable[[], Any]) -> Rounding:
    """The coarsest type that a step computes in.

    Args:
        module: The LightningModule.
        device: The rank's device.
        context: The precision plugin's context of the step.
    """
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    kinds = kinds or {torch.get_default_dtype()}
    with context():
        if torch.is_autocast_enabled(device.type):
            kinds.add(torch.get_autocast_dtype(device.type))
    found = [Rounding(str(kind).removeprefix("torch."), torch.finfo(kind).eps) for kind in kinds]
    if device.type == "cuda" and torch.float32 in kinds and _takes_tf32(module):
        found.append(Rounding("float32 in TF32 operations", 2.0**-10))
    return max(found, key=lambda rounding: rounding.eps)


def _takes_tf32(module: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.modules.conv._ConvNd) for child in module.modules())
    cudnn = convolves and torch.backends.cudnn.allow_tf32
    return cudnn or torch.get_float32_matmul_precision() != "highest"


@dataclass(frozen=True)
class Difference:
    """The largest difference of a gradient on one rank.

    Attributes:
        name: Name of the parameter.
        stage: A stage that holds it.
        absolute: Largest difference of an entry.
        size: Largest entry of the reference.
        excess: The difference, relative to that entry and to the rounding of the largest gradient
            of the model.
    """

    name: str
    stage: int
    absolute: float
    size: float
    excess: float

    @property
    def relative(self) -> float:
        """The difference relative to the largest entry of the reference."""
        if not self.size:
            return math.inf if self.absolute else 0.0
        return self.absolute / self.size


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
        pairs = list(self._pairs(held))
        left_out = [name for name, _, parameter, _ in pairs if has_gradient_hooks(parameter)]
        measured = [
            _measure(name, stage, parameter.grad, reference, self._scale)
            for name, stage, parameter, reference in pairs
            if name not in left_out
        ]
        largest, *lost = self._largest(
            [
                max((m.size for m in measured), default=0.0),
                float(any(m.overflows for m in measured)),
                float(any(m.reference_overflows for m in measured)),
            ]
        )
        noise = _NOISE * rounding.expected * largest
        found = [
            Difference(m.name, m.stage, m.absolute, m.size, m.absolute / ((m.size + noise) or 1.0))
            for m in measured
        ]
        worst = max(found, key=lambda difference: difference.excess, default=None)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, _Told(worst, self._mean_losses(), left_out))
        manner = self._outcomes[0].manner
        self._outcomes, self._losses = [], []
        if any(lost) and self._scale != 1.0:
            where = "with and without the pipeline" if all(lost) else "without the pipeline"
            where = where if lost[1] else "in the pipeline"
            self._say(
                f"overflows {where} at a loss scale of {self._scale:g}: the next one is compared."
            )
            return
        self.is_over = True
        if self._mesh.global_rank == 0:
            self._tell(told, manner, rounding)

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

    def _tell(self, told: list[_Told], manner: Manner, rounding: Rounding) -> None:
        found = [rank.worst for rank in told if rank.worst is not None]
        worst = max(found, key=lambda difference: difference.excess, default=None)
        own, reference = max((rank.losses for rank in told), key=lambda pair: _apart(*pair))
        text = f"loss {own:.9g} and {reference:.9g}"
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
        gradient = worst is not None and not worst.excess <= rounding.expected
        if gradient or not _apart(own, reference) <= rounding.expected:
            what = "loss" if worst is None or not gradient else f"gradient of {worst.name}"
            where = f" (stage {worst.stage})" if worst is not None and gradient else ""
            rank_zero_warn(
                f"The first training step is another one in the pipeline: the {what}{where} "
                f"differs far beyond the rounding of {rounding.name}, {text}. {_LOOK[manner]}."
            )

    def _say(self, text: str) -> None:
        if self._mesh.global_rank == 0:
            print(f"The first training step {text}", flush=True)


class _Measured(NamedTuple):
    """How far a gradient is from its reference, both without the loss scale.

    Attributes:
        name: Name of the parameter.
        stage: A stage that holds it.
        absolute: Largest difference of an entry.
        size: Largest entry of the reference.
        overflows: Whether an entry is infinite or no number.
        reference_overflows: Whether one of the reference is.
    """

    name: str
    stage: int
    absolute: float
    size: float
    overflows: bool
    reference_overflows: bool


def _measure(
    name: str, stage: int, gradient: Tensor | None, reference: Tensor, scale: float
) -> _Measured:
    if not reference.numel():
        return _Measured(name, stage, 0.0, 0.0, False, False)
    found = torch.zeros_like(reference)
    if gradient is not None:
        found = gradient.detach().to_dense().to("cpu", reference.dtype)
    lost, lost_too = ~found.isfinite(), ~reference.isfinite()
    apart = (found - reference).abs().masked_fill(lost & lost_too, 0.0)
    absolute = float(apart.nan_to_num(math.inf, math.inf).max()) / scale
    size = float(reference.abs().masked_fill(lost_too, 0.0).max()) / scale
    return _Measured(name, stage, absolute, size, bool(lost.any()), bool(lost_too.any()))


def _apart(own: float, reference: float) -> float:
    """Relative distance of two losses; 0 for two that are both no number."""
    if own == reference or (math.isnan(own) and math.isnan(reference)):
        return 0.0
    distance = abs(own - reference) / max(abs(own), abs(reference))
    return math.inf if math.isnan(distance) else distance


def _reason(rank: int, error: Exception) -> str:
    """Why a rank has no reference, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first
    if memory:
        return f"rank {rank} has no memory for the whole model and batch ({what})"
    return f"the step cannot run unpipelined on rank {rank} ({what})"
