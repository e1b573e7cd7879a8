"""A training step as without a pipeline, run on one rank with copies of all weights.

Nothing of it stays: logs, attributes, buffers, random states and the gradients of the module's own
parameters are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.batch import copied
from lightning_pipeline.mesh import Mesh, Scope
from lightning_pipeline.passes import StepPass, loss_of, weight_of
from lightning_pipeline.splitting import canonical_names, is_elsewhere, state_items
from lightning_pipeline.splitting.pictures import GENERATORS, Picture
from lightning_pipeline.splitting.torch_private import flush_flat_weights
from lightning_pipeline.steps import Microbatch, Runner, kept_random_state, patched, random_state
from lightning_pipeline.steps.attributes import set_attributes, untouched
from lightning_pipeline.steps.patches import silenced

RunnerOf = Callable[[int], Runner]
"""Makes what runs a stage."""


class Manner(Enum):
    """How the reference runs a batch."""

    WHOLE = "the whole batch"
    MICROBATCHES = "its microbatches one by one"
    PARTS = "its microbatches one by one, in the parts and with the random numbers of the stages"


@dataclass(frozen=True)
class Outcome:
    """What an unpipelined step gives.

    Attributes:
        loss: The loss of the batch.
        weight: The weight that the step gave to it, ``None`` if it gave none.
        gradients: On the host, of the parameters that were asked for, by their identity; summed
            over microbatches as the pipeline does, before any mean over replicas.
        manner: How it was run.
    """

    loss: float
    weight: float | None
    gradients: dict[int, Tensor]
    manner: Manner


class MeetsReplicasError(Exception):
    """A step meets the other replicas, which run it in their own time."""


def room(module: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """Memory for a copy of every parameter and buffer, by the original's identity.

    Args:
        module: The placed module.
        device: The rank's device.
    """
    made: dict[int, Tensor] = {}
    for item in state_items(module):
        if id(item.tensor) not in made:
            shape, dtype = tuple(item.tensor.shape), item.tensor.dtype
            made[id(item.tensor)] = torch.empty(shape, dtype=dtype, device=device)
    return made


@torch.no_grad()
def fetch(
    module: nn.Module,
    copies: Mapping[int, Tensor],
    holders: Mapping[str, frozenset[int]],
    mesh: Mesh,
) -> None:
    """Fills copies of everything from the ranks that hold it; all ranks call it.

    Args:
        module: The placed module.
        copies: What :func:`room` gave.
        holders: Stages that hold each tensor, by canonical name.
        mesh: The rank's place, groups built.
    """
    canonical = canonical_names(module)
    for *_, name, tensor in state_items(module):
        if canonical[name] != name:
            continue
        copy = copies[id(tensor)]
        if not is_elsewhere(tensor):
            copy.copy_(tensor)
        if name in holders:
            dist.broadcast(copy, mesh.holder_ranks(holders[name])[0], mesh.pipeline_group)


class Unpipelined:
    """Runs training steps without the pipeline.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place.
        device: The rank's device.
        context: The precision plugin's context of the training step.
        runner: Makes what runs a stage, for steps with random numbers.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        device: torch.device,
        context: Callable[[], Any],
        runner: RunnerOf,
    ) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._context, self._runner = context, runner

    def __call__(
        self, work: StepPass, batch: Any, copies: Mapping[int, Tensor], manner: Manner
    ) -> Outcome:
        """Runs the step of one batch, forward and backward.

        Args:
            work: What the pipeline is about to run.
            batch: The whole batch.
            copies: Values of all parameters and buffers, by the original's identity.
            manner: How to run it; a step that turns out to draw is run again, in the parts that
                stages run, since only these draw the same numbers.
        """
        outcome, draws = self._attempt(work, batch, copies, manner)
        if not draws or manner is Manner.PARTS:
            return outcome
        del outcome
        return self._attempt(work, batch, copies, Manner.PARTS)[0]

    def _attempt(
        self, work: StepPass, batch: Any, copies: Mapping[int, Tensor], manner: Manner
    ) -> tuple[Outcome, bool]:
        module, device = self._module, self._device
        with (
            untouched(module),
            kept_random_state(device),
            self._mesh.within(Scope.ALONE),
            patched([*silenced(module, readable=True), *self._strangers()]),
        ):
            leaves = _put(module, copies)
            generators, before = Picture(module.named_modules()), _marks(device)
            losses, weights = [], []
            for loss, weight in self._losses(work, batch, manner):
                losses.append(loss)
                weights.append(weight)
            changed = [type(change.holder) for change in generators.changes()]
            draws = _marks(device) != before or any(issubclass(c, GENERATORS) for c in changed)
            gradients = {
                id(own): _on_host(leaves[id(own)].grad)
                for own in _unique(work)
                if own.requires_grad and leaves[id(own)].grad is not None
            }
        shares = [1.0] if manner is Manner.WHOLE else map(work.cut.share, range(len(losses)))
        given = [weight for weight in weights if weight is not None]
        total = sum(given) if given else None
        counts = list(shares) if total is None else [weight / (total or 1.0) for weight in given]
        mean = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count)
        return Outcome(float(mean), total, gradients, manner), draws

    def _strangers(self) -> list[tuple[object, str, Any]]:
        """Patches under which a step that meets the other replicas ends here."""
        if self._mesh.sizes.data == 1:
            return []

        def met(*args: Any, **kwargs: Any) -> Any:
            raise MeetsReplicasError

        names = ("reduce", "all_gather", "broadcast", "reduce_boolean_decision")
        return [(self._module.trainer.strategy, name, met) for name in names]

    def _losses(
        self, work: StepPass, batch: Any, manner: Manner
    ) -> Iterator[tuple[float, float | None]]:
        """Loss and weight of each part of the batch, whose backward has run."""
        if manner is Manner.WHOLE:
            whole = replace(work.microbatches[0], batch=batch, starts={})
            yield self._backward(work, whole, self._natively(whole), 1.0)
            return
        run = self._natively if manner is Manner.MICROBATCHES else self._in_parts()
        for index, microbatch in enumerate(work.microbatches[: len(work.cut.sizes)]):
            item = replace(microbatch, log=_nothing)
            yield self._backward(work, item, run(item), work.cut.share(index))

    def _natively(self, item: Microbatch) -> Any:
        set_attributes(self._module, item.starts)
        with torch.compiler.set_stance("force_eager"), self._context():
            return self._module.training_step(copied(item.batch), *item.rest)

    def _in_parts(self) -> Callable[[Microbatch], Any]:
        runners = [self._runner(stage) for stage in range(self._mesh.num_stages)]

        def run(item: Microbatch) -> Any:
            given: tuple[Tensor, ...] | None = ()
            returned = None
            for runner in runners:
                given, returned = runner(item, given or ())
            return returned

        return run

    def _backward(
        self, work: StepPass, item: Microbatch, returned: Any, share: float
    ) -> tuple[float, float | None]:
        loss, weight = loss_of(item, returned), weight_of(item, returned)
        weight = None if weight is None else float(weight)
        if weight != 0.0:
            factor = share / work.accumulated if weight is None else weight
            (loss * (work.scale * factor)).backward()
        return float(loss.detach()), weight


def _put(module: nn.Module, copies: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Puts copies in the places of parameters and buffers, and gives them by the originals."""
    items, leaves = list(state_items(module)), dict[int, Tensor]()
    for item in items:
        own = item.tensor
        if id(own) not in leaves:
            value = copies[id(own)]
            leaves[id(own)] = (
                nn.Parameter(value, own.requires_grad)
                if isinstance(own, nn.Parameter)
                else value.clone().requires_grad_(own.requires_grad)  # the step may write to it
            )
            if not is_elsewhere(own):
                leaves[id(own)].__dict__.update(own.__dict__)
        item.entries[item.key] = leaves[id(own)]
    for item in items:
        flush_flat_weights(item.owner)
    return leaves


def _unique(work: StepPass) -> Iterable[nn.Parameter]:
    """The parameters that this rank holds, each once."""
    return {id(p): p for held in work.held.parameters.values() for p in held}.values()


def _on_host(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    exact = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.detach().to_dense().to("cpu", exact, copy=True)


def _marks(device: torch.device) -> Any:
    """The states of the random generators, to be compared."""
    host, numpy, python, *others = random_state(device)
    states = [state.numpy().tobytes() for state in (host, *others)]
    return states, numpy[1].tobytes(), numpy[2:], python


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for ``self.log``."""
