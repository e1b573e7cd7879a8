"""Surveys of a LightningModule's steps, as many as it takes to know what their values are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.errors import PipelineError, StepError
from lightning_pipeline.lightning_private import MODULE_DEVICE
from lightning_pipeline.merging import Place
from lightning_pipeline.mesh import Mesh, Scope
from lightning_pipeline.reporting import kind_of
from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.steps import (
    ABSENT,
    Analyst,
    Carries,
    HandMade,
    Request,
    Survey,
    patched,
    survey,
)
from lightning_pipeline.steps.leftovers import LeakError

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Example:
    """What a step is surveyed on.

    Attributes:
        batch: The whole batch.
        microbatch: The first microbatch of it.
        rows: Rows of both.
        rest: The step's further arguments.
    """

    batch: Any
    microbatch: Any
    rows: tuple[int, int]
    rest: tuple[Any, ...]


@dataclass(frozen=True)
class Candidate:
    """A step that the model may be placed by.

    Attributes:
        step: Name of the step method.
        context: Its precision context.
        example: A batch for it.
        is_next: Whether it is about to run on this batch; others may fail on it.
    """

    step: str
    context: Context
    example: Example
    is_next: bool


class Observer:
    """Surveys the steps of one LightningModule.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place.
        only: Dotted name of the single module to cut, ``None`` for all that hold weights.
        device: The rank's device.
        seed: Seed of random numbers drawn in surveys.
        uncut: Classes of modules that are not cut.
        is_timed: Whether times are going to be measured.

    Attributes:
        carries: What the steps carry from batch to batch.
        counts: Where each step makes whole numbers that depend on the microbatch.
        unsure: Where it may; see :class:`lightning_pipeline.merging.Merger`.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        only: str | None,
        device: torch.device,
        seed: int,
        uncut: tuple[type[nn.Module], ...] = (),
        is_timed: bool = False,
    ) -> None:
        self._module, self._mesh, self._only = module, mesh, only
        self._device, self._seed = device, seed
        self._by_hand = HandMade.of(module, only, mesh.num_stages)
        self._analyst = Analyst(module, mesh.num_stages, device, uncut=uncut, is_timed=is_timed)
        self.carries = Carries(module)
        self.counts: dict[str, set[Place]] = {}
        self.unsure: dict[str, set[Place]] = {}
        self._known_numbers: dict[str, set[Place]] = {}
        self._first_seen: dict[str, _Seen] = {}

    def observe(self, step: str, example: Example, context: Context, made_up: bool) -> Survey:
        """Surveys one signature of a step of the placed module; see :class:`Request`.

        All ranks of a pipeline survey a step for the first time together; a later signature may
        be known to some of them.

        Raises:
            StepError: If the step fails on a rank before it has made all calls.
        """
        with self._mesh.within(Scope.ALONE):
            found = self._survey(step, example, context, self._analyst, self._device, made_up)
        own = _Seen.of(found, self._mesh.global_rank)
        if step in self._first_seen:
            _require_all_calls(step, [self._first_seen[step], own], found)
        elif self._mesh.sizes.pipeline > 1:
            seen: list[Any] = [None] * self._mesh.sizes.pipeline
            dist.all_gather_object(seen, own, self._mesh.pipeline_group)
            _require_all_calls(step, seen, found)
        self._first_seen.setdefault(step, own)
        return found

    def observe_all(self, candidates: list[Candidate]) -> dict[str, Survey]:
        """Surveys the steps of a run where the weights are, before they are placed.

        Args:
            candidates: The steps, the same on all ranks; all of them call it.

        Returns:
            The surveys that every rank has made; what is not next may be missing.

        Raises:
            PipelineError: If the step that is next cannot be surveyed on this rank, or has failed
                on a rank before it has made all calls.
        """
        surveys = {}
        for candidate in candidates:
            try:
                with self._mesh.within(Scope.ALONE):
                    found = self._survey_one(candidate)
            except LeakError:
                raise
            except PipelineError:
                if candidate.is_next:
                    raise
                continue  # another kind of batch, say; it speaks up when its own comes
            if found.error is None or candidate.is_next:
                surveys[candidate.step] = found
        return self._agreed(candidates, surveys)

    def _agreed(self, candidates: list[Candidate], surveys: dict[str, Survey]) -> dict[str, Survey]:
        """Leaves what all ranks have surveyed: they are going to place the module by the same."""
        own = {step: _Seen.of(found, self._mesh.global_rank) for step, found in surveys.items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        agreed = {}
        for step in [candidate.step for candidate in candidates]:
            if not all(step in seen for seen in ranks):
                continue  # it speaks up where it fails when its own turn comes
            agreed[step] = surveys[step]
            there = [ranks[rank][step] for rank in self._mesh.pipeline_ranks]
            _require_all_calls(step, there, surveys[step])
        return agreed

    def _survey_one(self, candidate: Candidate) -> Survey:
        """Surveys in the step's mode where the weights are: on the host, before they are placed."""
        modes = [(child, child.training) for child in self._module.modules()]
        state = [t for *_, t in state_items(self._module)]
        made_up = any(map(is_elsewhere, state))  # no rank holds any weights yet
        there = [t.device for t in state if not is_elsewhere(t)]
        host = next(iter(there), torch.device("cpu") if made_up else self._device)
        analyst = self._analyst
        if host != self._device:
            analyst = Analyst(
                self._module,
                self._mesh.num_stages,
                host,
                analyst.leaves,
                analyst.uncut,
                is_timed=analyst.is_timed,
            )
        try:
            if not candidate.is_next:  # then modules have the modes that they are to have
                self._module.train(candidate.step == "training_step")
            with patched([(self._module, MODULE_DEVICE, host)]):
                return self._survey(
                    candidate.step, candidate.example, candidate.context, analyst, host, made_up
                )
        finally:
            for child, training in modes:
                child.training = training

    def _survey(
        self,
        step: str,
        example: Example,
        context: Context,
        analyst: Analyst,
        device: torch.device,
        made_up: bool,
    ) -> Survey:
        """Surveys a step, and again on the whole batch if that tells what a value is."""

        def once(batch: Any) -> Survey:
            return survey(
                Request(
                    self._module,
                    step,
                    move_data_to_device(batch, device),
                    example.rest,
                    analyst,
                    context,
                    device,
                    self._seed,
                    made_up,
                    self._only,
                    self._by_hand,
                )
            )

        found, rows = once(example.microbatch), (example.rows[1], example.rows[0])
        if rows[0] == rows[1]:
            return found
        if self.carries.unknown(found.carried):
            # Another start tells what is added to a number from what replaces it. It may not be
            # as far away as the rows are apart, or a count of batches looks like one of samples.
            shift = 2 if rows[1] - rows[0] == 1 else 1
            ints = {n: v.before for n, v in found.carried.items() if type(v.before) is int}
            shifted = {name: before + shift for name, before in ints.items()}
            with self._attributes(shifted):
                self.carries.learn(step, found.carried, once(example.batch).carried, rows)
        known = self._known_numbers.setdefault(step, set())
        if found.numbers.keys() - known:
            wholes = self.carries.wholes(found.carried)
            wholes = {name: value for name, value in wholes.items() if type(value) is int}
            [start, _] = self.carries.starts(wholes, (rows[0], rows[1] - rows[0]))
            with self._attributes(start):
                numbers = once(example.microbatch).numbers if start else found.numbers
            again = once(example.batch).numbers
            known.update(found.numbers)
            differ = {place for place, number in numbers.items() if again.get(place) != number}
            self.counts.setdefault(step, set()).update(differ)
            self.unsure.setdefault(step, set()).update(found.unsure - differ)
        return found

    def _attributes(self, values: dict[str, Any]) -> AbstractContextManager[None]:
        there = {name: value for name, value in values.items() if value is not ABSENT}
        return patched([(self._module, name, value) for name, value in there.items()])


class _Seen(NamedTuple):
    """What a rank has seen of a step: the number of calls, and the error behind the last one."""

    rank: int
    num_calls: int
    error: str

    @classmethod
    def of(cls, found: Survey, rank: int) -> _Seen:
        return cls(rank, len(found.calls), "" if found.error is None else kind_of(found.error))


def _require_all_calls(step: str, seen: Sequence[_Seen], found: Survey) -> None:
    """Refuses a step that has failed before calls that it makes elsewhere: plans would differ."""
    most = max(each.num_calls for each in seen)
    for each in seen:
        if each.error and each.num_calls < most:
            raise StepError(
                f"{step} must make the same calls of modules on every rank of a pipeline, but has "
                f"failed on rank {each.rank} behind {each.num_calls} of {most} calls: {each.error}"
            ) from found.error
