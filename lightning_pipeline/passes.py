"""One batch of one step, as the engine runs it over this rank's stages."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline import transfers
from lightning_pipeline.batch import Cut
from lightning_pipeline.batchnorm import counting
from lightning_pipeline.errors import StepError
from lightning_pipeline.loaders import SameBatch
from lightning_pipeline.logs import LogRecorder
from lightning_pipeline.merging import Merger, Place, detached, mean
from lightning_pipeline.metrics import StepMetrics
from lightning_pipeline.placing import Held
from lightning_pipeline.steps import (
    Carries,
    Microbatch,
    MicrobatchBuffers,
    Runner,
    TensorMeta,
    gradient_missing,
    modes_of,
)
from lightning_pipeline.steps.patches import patched
from lightning_pipeline.transfers import Readback


@dataclass
class StepPass:
    """The work of one batch; see :class:`lightning_pipeline.engine.Work`.

    Attributes:
        microbatches: What the schedule runs, fillers included.
        cut: How the batch's rows are dealt out.
        trains: Whether there is a backward.
        scale: Factor of every loss: the scale of 16-bit gradients.
        accumulated: Number of batches whose gradients are averaged.
        runners: This rank's stages.
        held: What this rank holds.
        recorder: Takes the logs on the last stage.
        metrics: Takes the calls of metrics on the last stage.
        carries: What steps carry from batch to batch.
        wholes: What this one starts from, for the whole batch.
        counts: Where the step makes whole numbers that depend on the microbatch.
        unsure: Where it may.
        modes: Modes of the modules and ``requires_grad`` before it.
        outputs: What the step returned for each microbatch with rows, on the last stage.
        appended: What the step appended to the module's lists for each microbatch with rows.
        assigned: What it set other attributes of the module to, likewise.
        losses: Loss of each microbatch with rows, on the last stage of a training pass.
        weights: The weight that the step returned for each of them, ``None`` if it did not; a
            tensor as long as it is on the device only.
        same: The comparison of the ranks' batches, as long as it is under way.
        buffers: Copies of buffers, if the microbatches are to have some of their own.
        came: Stage and index of the received values for which a gradient has come back.
    """

    microbatches: list[Microbatch]
    cut: Cut
    trains: bool
    scale: float | Tensor
    accumulated: int
    runners: dict[int, Runner]
    held: Held
    recorder: LogRecorder
    metrics: StepMetrics
    carries: Carries
    wholes: dict[str, Any]
    counts: set[Place]
    unsure: frozenset[Place]
    modes: Hashable
    outputs: list[Any] = field(default_factory=list)
    appended: list[dict[Place, list[Any]]] = field(default_factory=list)
    assigned: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    weights: list[float | Tensor | None] = field(default_factory=list)
    same: SameBatch | None = None
    buffers: MicrobatchBuffers | None = None
    came: set[tuple[int, int]] = field(default_factory=set)
    _coming: Readback | None = None

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    @property
    def key(self) -> Hashable:
        # weakly: plans that have been made anew are to go
        return tuple(weakref.ref(microbatch.plan) for microbatch in self.microbatches)

    def boundary(self, stage: int, microbatch: int) -> list[TensorMeta]:
        """Tensors that ``stage`` receives: its carried values, then the fingerprints."""
        plan = self.microbatches[microbatch].plan
        marks = TensorMeta((len(plan.calls),), torch.float64, False)
        values = plan.boundary(stage)
        if not self.trains:
            values = [meta._replace(requires_grad=False) for meta in values]
        return [*values, marks]

    def before_messages(self) -> None:
        """Makes sure that all ranks have begun with the same batch."""
        if self.same is not None:
            self.same.require()

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        """Runs one stage on one microbatch; the loss on the last stage."""
        if self.cut.is_filler(microbatch):
            return self._fill(stage, microbatch)
        if self.buffers is not None and not self.runners[stage].manner.recomputes:
            self.buffers.renew(self.microbatches[microbatch].plan)
        with counting(microbatch):
            return self._run(stage, microbatch, received)

    def _run(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        item, runner = self.microbatches[microbatch], self.runners[stage]
        if stage < item.plan.num_stages - 1:
            values = runner(item, received)[0]
            runner.forget()
            return values
        rows = self.cut.sizes[microbatch]
        self.recorder.rows = rows
        self.metrics.begin(rows)
        with patched(self.metrics.patches()):
            returned = runner(item, received)[1]
        self.outputs.append(detached(self.metrics.marked(returned)))
        self.appended.append(detached(self.metrics.marked(runner.appended)))
        self.assigned.append(detached(runner.assigned))
        runner.forget()
        self.weights.append(weight_of(item, returned))
        self.recorder.end(_given_loss(returned))
        if len(self.weights) == len(self.cut.sizes):
            found = [weight for weight in self.weights if isinstance(weight, Tensor)]
            self._coming = Readback(torch.stack(found)) if found else None
        return self._loss(item, returned)

    def _fill(self, stage: int, microbatch: int) -> Any:
        """What a microbatch of weight 0 sends: zeros, for which nothing is run."""
        device = self.runners[stage].device
        if stage == self.microbatches[microbatch].plan.num_stages - 1:
            return torch.zeros((), device=device)
        return tuple(meta.fill(0, device) for meta in self.boundary(stage + 1, microbatch))

    def _loss(self, item: Microbatch, returned: Any) -> Tensor:
        if not self.trains:
            return torch.zeros(())
        loss = loss_of(item, returned)
        # The mean over nothing is NaN, which no factor makes a zero.
        weight = self.weights[-1]
        if isinstance(weight, Tensor):
            loss = torch.where(weight == 0.0, loss.nan_to_num(0.0, 0.0, 0.0), loss)
        elif weight == 0.0:
            loss = loss.nan_to_num(0.0, 0.0, 0.0)
        self.losses.append(loss.detach())
        return loss

    def loss_factor(self, microbatch: int) -> float | Tensor:
        if self.cut.is_filler(microbatch):
            return 0.0
        weight = self.weights[microbatch]
        if weight is not None:  # divided by the sum of all weights when it is known
            return self.scale * weight
        return self.scale * self.cut.share(microbatch) / self.accumulated

    def settle(self) -> None:
        """Waits for the weights that are on the device, on the last stage.

        Raises:
            StepError: If one is no weight.
        """
        if self._coming is not None:
            step, coming = self.microbatches[0].plan.step, iter(self._coming.wait().tolist())
            self.weights = [
                _checked(step, next(coming)) if isinstance(weight, Tensor) else weight
                for weight in self.weights
            ]
        self.recorder.weigh(self._numbers())

    def _numbers(self) -> list[float | None]:
        """The weights, when none is on the device."""
        return [None if weight is None else float(weight) for weight in self.weights]

    def weight(self) -> float | None:
        """The weight that the step gave to the batch, on the last stage.

        Raises:
            StepError: If it gave one to some of the microbatches only.
        """
        given = [weight for weight in self._numbers() if weight is not None]
        if given and len(given) < len(self.weights):
            raise StepError(
                "The step returned a 'weight' for some microbatches and none for others. Return "
                "it always, or never."
            )
        return sum(given) if given else None

    def _shares(self) -> list[float]:
        """What each microbatch with rows counts in means over the batch."""
        total = self.weight()
        if total is None:
            return [self.cut.share(index) for index in range(len(self.cut.sizes))]
        return [(weight or 0.0) / (total or 1.0) for weight in self._numbers()]

    def seconds(self, stage: int) -> float:
        return self.microbatches[0].plan.stage_cost[stage]

    def parameters(self, stage: int) -> list[nn.Parameter]:
        return self.held.parameters[stage]

    def returned(self, stage: int, microbatch: int, gradients: tuple[Tensor | None, ...]) -> None:
        if not self.cut.is_filler(microbatch):
            self.came |= {(stage, i) for i, grad in enumerate(gradients) if grad is not None}

    def check_dependence(self, is_last: bool) -> None:
        """Refuses a step that did in this batch what it was not planned with.

        Args:
            is_last: Whether this rank has run the step to its end.

        Raises:
            StepError: If it has switched what stages inside of its calls do not see, or its loss
                does not depend on a call any more.
        """
        plan = self.microbatches[0].plan
        switches = any(microbatch.plan.switches for microbatch in self.microbatches)
        if is_last and not switches and modes_of(self._module) != self.modes:
            raise StepError(
                f"{plan.step} switched the mode or requires_grad of modules, but did not when it "
                "was planned: ranks that run the inside of its calls do not see it. Switch them in "
                "a hook, e.g. on_train_batch_start."
            )
        missing = plan.expected.check(self.came) if self.trains else None
        if missing is not None:
            stage, value = missing
            label = plan.calls[plan.carried[stage][value].call].label
            raise gradient_missing(plan.step, label)

    def check_fingerprints(self) -> None:
        """Refuses a batch of which two ranks have computed different arguments of a call.

        Raises:
            StepError: Naming the call.
        """
        for runner in self.runners.values():
            flags, runner.mismatches = runner.mismatches, []
            for call, flag in flags:
                if flag.wait().tolist():
                    raise self._differing(call, runner.stage)

    def _differing(self, call: str, stage: int) -> StepError:
        return StepError(
            f"{self.microbatches[0].plan.step}: the arguments of {call} on stage {stage} differ "
            "from those on the stage before: what the step computes from them is not the same on "
            "every rank. Usual causes: an attribute that only the end of the step changes, or a "
            "random source that seed_everything does not know."
        )

    def finished(self, stage: int) -> None:
        self.held.reducer.finished(stage)

    def loss(self) -> Tensor | None:
        """Mean loss over the batch; ``None`` where it is not known."""
        if not self.losses:
            return None
        return mean(self.losses, self._shares())

    def appended_to_lists(self) -> dict[Place, list[Any]]:
        """What the step would have appended for the whole batch, on the last stage."""
        return self.metrics.filled(self._merger().lists(self.appended))

    def _merger(self) -> Merger:
        rest = self.microbatches[0].rest
        index = rest[0] if rest and type(rest[0]) is int else None
        return Merger(self.cut.all_sizes, self._shares(), self.counts, self.unsure, index)

    @property
    def _module(self) -> nn.Module:
        return next(iter(self.runners.values())).module

    def assigned_attributes(self) -> dict[str, Any]:
        """What the step would have set attributes to for the whole batch, on the last stage."""
        if not self.assigned:
            return {}
        carried = self.carries.join(self.wholes, self.assigned)
        others = [{n: v for n, v in given.items() if n not in carried} for given in self.assigned]
        return {**self._merger().attributes(others), **carried}

    def more(self) -> tuple[Any, dict[Place, list[Any]], dict[str, Any]] | None:
        """What other ranks need of the last stage besides logs; ``None`` for the usual step."""
        output, appended, assigned = (
            self.output(),
            self.appended_to_lists(),
            self.assigned_attributes(),
        )
        if self.trains:  # the loss travels by itself
            rest = dict(output) if isinstance(output, Mapping) else {}
            rest.pop("loss", None)
            output = rest or None
        return (output, appended, assigned) if output is not None or appended or assigned else None

    def output(self) -> Any:
        """What the step would have returned for the whole batch, on the last stage."""
        if not self.outputs:
            return None
        total, outputs = self.weight(), self.outputs
        if total is not None:  # which is not asked of the device once more
            outputs = [
                {**given, "weight": 0.0} if type(given) is dict else given for given in outputs
            ]
        merged = self.metrics.filled(self._merger()(outputs, ("output",)))
        if total is not None and isinstance(merged, dict):
            merged["weight"] = total
        return merged


def _given_loss(returned: Any) -> Any:
    return returned.get("loss") if isinstance(returned, Mapping) else returned


def loss_of(item: Microbatch, returned: Any) -> Tensor:
    loss = _given_loss(returned)
    step = item.plan.step
    if not isinstance(loss, Tensor):
        raise StepError(
            f"{step} must return a loss, a tensor or a dict with the key 'loss'; got "
            f"{type(loss).__name__}. Skipping a batch by returning None is not possible when it is "
            "cut into microbatches: return a loss multiplied by 0."
        )
    if not loss.requires_grad:
        raise StepError(
            f"The loss that {step} returned does not depend on any parameter through autograd. "
            "Check that it is not detached or computed under torch.no_grad()."
        )
    if loss.numel() != 1:
        raise StepError(
            f"{step} must return a single number as loss, got shape {tuple(loss.shape)}. Return "
            "its mean, e.g. loss.mean()."
        )
    return loss.reshape(())


def weight_of(item: Microbatch, returned: Any) -> float | Tensor | None:
    """The weight that a step returned, on its device if that is not the host."""
    weight = returned.get("weight") if isinstance(returned, Mapping) else None
    if isinstance(weight, Tensor) and weight.numel() == 1:
        if not transfers.is_host(weight.device):
            return weight.detach().double().reshape(())
        weight = weight.item()
    return None if weight is None else _checked(item.plan.step, weight)


def _checked(step: str, weight: Any) -> float:
    if not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise StepError(
            f"The 'weight' that {step} returns must be a single number of at least 0, got "
            f"{weight!r}. It says what the loss of this microbatch counts in the mean, e.g. the "
            "number of tokens that it is a mean over."
        )
    return float(weight)
