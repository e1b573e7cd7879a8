"""Runs one stage's part of the user's step on one microbatch.

Every call of a module with weights is answered (it ended on an earlier stage), run (here), run in
part (it is cut) or left pending (it ends on a later stage). Behind the last call in which the stage
has a part the step is stopped by a private BaseException; on the last stage it runs to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.batch import copied
from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import is_elsewhere
from lightning_pipeline.splitting.ambient import ambient_settings
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.analyst import PLAIN, signature_of
from lightning_pipeline.steps.attributes import (
    ABSENT,
    Path,
    is_same_dict,
    is_sendable,
    lists_of,
    own_attributes,
    set_attributes,
    take_off,
)
from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.execution import Execution, Manner
from lightning_pipeline.steps.microbatch import Microbatch, Progress, fingerprint
from lightning_pipeline.steps.patches import past_compilation, patched, present, silenced
from lightning_pipeline.steps.pending import Pending, TensorMeta, tensors
from lightning_pipeline.steps.plan import StepPlan, describe_calls
from lightning_pipeline.steps.streams import mix, seed_all
from lightning_pipeline.transfers import Readback

_Changes = list[tuple[object, str, Any]]
_Interception = tuple[_Changes, list[tuple[nn.Module, Any]]]


class StageDone(BaseException):
    """Stops the user's step; no Exception, so that `except Exception` does not catch it."""


@dataclass
class Runner:
    """Runs one stage's parts of a step.

    Args:
        module: The user's LightningModule.
        stage: Index of the stage.
        context: The precision plugin's context of this step.
        device: The rank's device.
        manner: How it runs them.

    Attributes:
        mismatches: For each compared fingerprint whether it differs, with the call's name.
        appended: What the last run of the step appended to the module's lists; taken off again.
        assigned: What it set other attributes of the module to.
    """

    module: LightningModule
    stage: int
    context: Callable[[], AbstractContextManager[Any]]
    device: torch.device
    manner: Manner = field(default_factory=Manner)
    mismatches: list[tuple[str, Readback]] = field(default_factory=list)
    appended: dict[Path, list[Any]] = field(default_factory=dict)
    assigned: dict[str, Any] = field(default_factory=dict)
    _silenced: list[tuple[object, str, Any]] = field(default_factory=list)
    _interceptors: WeakKeyDictionary[StepPlan, _Interception] = field(
        default_factory=WeakKeyDictionary
    )
    _running: tuple[Microbatch, Progress] | None = None

    def __post_init__(self) -> None:
        self._execute = Execution(self.module, self.device, self.manner)

    def __call__(
        self, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...] | None, Any]:
        """Runs the stage on ``microbatch``.

        Args:
            microbatch: What to run.
            carried: The plan's carried values of this stage, then the fingerprints, float64 of
                shape [calls]. Empty on the first stage.

        Returns:
            On the last stage ``(None, what the step returned)``, on the others ``(values for the
            next stage, None)``.
        """
        plan = microbatch.plan
        is_last = self.stage == plan.num_stages - 1
        progress = self._receive(plan, carried, microbatch.compares)
        if not is_last and plan.last_call[self.stage] < 0:
            return self._give(plan, progress), None
        inner = None if is_last else self._strictly_inside(plan)
        if inner is not None:
            with self.context():
                self._run_part(plan.calls[inner], inner, microbatch, progress, None)
            return self._give(plan, progress), None
        returned = self._run_step(microbatch, progress, is_last)
        return (None, returned) if is_last else (self._give(plan, progress), None)

    def forget(self) -> None:
        """Lets go of what the last run of the step has left, and of its activations."""
        self.appended, self.assigned = {}, {}

    def _receive(self, plan: StepPlan, carried: tuple[Tensor, ...], compares: bool) -> Progress:
        progress = Progress({}, {}, list(carried[-1]) if self.stage and compares else [])
        for known, tensor in zip(plan.carried[self.stage], carried, strict=False):
            complete = plan.cuts[known.call][self.stage] == plan.calls[known.call].num_pieces
            values = progress.results if complete else progress.live
            values.setdefault(known.call, {})[known.key] = tensor
        return progress

    def _give(self, plan: StepPlan, progress: Progress) -> tuple[Tensor, ...]:
        after = self.stage + 1
        values = []
        for known in plan.carried[after]:
            complete = plan.cuts[known.call][after] == plan.calls[known.call].num_pieces
            value = (progress.results if complete else progress.live)[known.call][known.key]
            if value.requires_grad and not plan.calls[known.call].may_train(known.key, complete):
                raise plan.calls[known.call].trains_now()
            values.append(self._apart(value))
        marks = torch.full((len(plan.calls),), math.nan, dtype=torch.float64, device=self.device)
        if progress.marks:
            marks[: len(progress.marks)] = torch.stack(progress.marks)
        return (*values, marks)

    def _apart(self, value: Tensor) -> Tensor:
        """``value``, copied if it is a buffer, to which the next microbatch may write."""
        if value.requires_grad or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage().data_ptr()
        buffers = (b for b in self.module.buffers() if not is_elsewhere(b))
        if any(b.untyped_storage().data_ptr() == storage for b in buffers):
            return value.clone()
        return value

    def _strictly_inside(self, plan: StepPlan) -> int | None:
        """The call that this stage is a middle part of, if that part needs nothing of the step."""
        here = [i for i, cut in enumerate(plan.cuts) if cut[self.stage] < cut[self.stage + 1]]
        if len(here) != 1 or plan.cuts[here[0]][self.stage] == 0:
            return None
        call = plan.calls[here[0]]
        ends = plan.cuts[here[0]][self.stage + 1] == call.num_pieces
        if ends or call.ambient or plan.part(here[0], self.stage).positions:
            return None
        return here[0]

    def _run_step(self, microbatch: Microbatch, progress: Progress, is_last: bool) -> Any:
        plan, module = microbatch.plan, self.module
        batch = copied(microbatch.batch) if plan.writes_batch else microbatch.batch
        changes = [*self._intercepted(plan)]
        if self.manner.compile is not None:
            progress.unpatched = present(changes)
        if plan.by_hand is not None:
            changes += plan.by_hand.changes()
        if not is_last:
            self._silenced = self._silenced or silenced(module)
            changes += self._silenced
        else:
            changes.append((module, "log", microbatch.log))
        set_attributes(module, microbatch.starts)
        everything = dict(module.__dict__)
        before = own_attributes(module)
        lists = lists_of(module, before, plan.grown)
        try:
            self._running = microbatch, progress
            seed_all(microbatch.seed, self.device)
            with self.context(), patched(changes):
                progress.ambient = ambient_settings()
                returned = getattr(module, plan.step)(batch, *microbatch.rest)
        except StageDone:
            return None
        finally:
            self._running = None
            self.appended = take_off(module, before, plan.grown, lists, plan.step)
            known = microbatch.starts or plan.assigned
            if known or not is_same_dict(everything, module.__dict__):
                self.assigned = self._assigned(plan, microbatch, before)
            else:
                self.assigned = {}
        self._check_complete(plan, progress, is_last)
        progress.undone.check(plan.step, returned)
        return returned

    def _assigned(
        self, plan: StepPlan, microbatch: Microbatch, before: dict[str, Any]
    ) -> dict[str, Any]:
        """Attributes that the step has set, and those that it carries.

        They are taken back, so that every microbatch begins with what the batch before has left.
        """
        assigned = {}
        for name, value in own_attributes(self.module).items():
            old = before.get(name, ABSENT)
            known = name in microbatch.starts or (name in plan.assigned and isinstance(old, PLAIN))
            if (old is value and not known) or not is_sendable(value):
                continue
            assigned[name] = value
            set_attributes(self.module, {name: old})
        return assigned

    def _check_complete(self, plan: StepPlan, progress: Progress, is_last: bool) -> None:
        made, planned = progress.num_calls, len(plan.calls)
        if made != planned:
            raise StepError(
                f"{plan.step} made {made} of the {planned} calls that it was planned with; missing "
                f"are {describe_calls(plan.calls[made:])}. Which modules a step calls may not "
                "change from batch to batch: call them always and multiply their loss by 0."
            )
        if not is_last:
            raise StepError(
                f"{plan.step} swallowed the BaseException by which a stage ends its part: there is "
                "a bare `except:` around its calls. Catch `Exception` instead."
            )

    def _intercepted(self, plan: StepPlan) -> _Changes:
        """Patches under which calls of modules with weights come here."""
        known = self._interceptors.get(plan)
        if known is not None and all(
            forward == (child.__dict__.get("forward"), type(child).forward)
            for child, forward in known[1]
        ):
            return known[0]
        changes: _Changes = [
            (child, "forward", self._interceptor(name, child)) for name, child in plan.targets
        ]
        for _, child in plan.targets:
            changes += past_compilation(child, self._is_busy)
        given: list[tuple[nn.Module, Any]] = [
            (child, (child.__dict__.get("forward"), type(child).forward))
            for _, child in plan.targets
        ]
        self._interceptors[plan] = changes, given
        return changes

    def _is_busy(self) -> bool:
        return self._running is not None and self._running[1].busy

    def _interceptor(self, name: str, child: nn.Module) -> Callable[..., Any]:
        forward = child.forward

        def intercepted(*args: Any, **kwargs: Any) -> Any:
            assert self._running is not None, "called outside of a step"
            if self._running[1].busy:
                return forward(*args, **kwargs)
            return self._on_call(name, forward, *self._running, args, kwargs)

        return intercepted

    def _on_call(
        self,
        name: str,
        forward: Callable[..., Any],
        microbatch: Microbatch,
        progress: Progress,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        plan, index = microbatch.plan, progress.num_calls
        progress.num_calls += 1
        self._check_sequence(plan, name, index)
        call, cut = plan.calls[index], plan.cuts[index]
        if not call.ambient and ambient_settings() != progress.ambient:
            raise StepError(
                f"{plan.step} calls {call.label} under autocast or grad modes that it did not have "
                "when it was planned: ranks that run the inside of the call do not see them. "
                "Enter them from the first batch on."
            )
        low, high = cut[self.stage], cut[self.stage + 1]
        pending = any(isinstance(tensor, Pending) for tensor in tensors((args, kwargs)))
        if low < high and pending:
            raise StepError(f"{call.label} needs a value that a later stage makes.")
        if low < high and call.trains:
            progress.undone.check(plan.step, (args, kwargs))
        if microbatch.compares and not pending and (low < high or low == call.num_pieces):
            self._compare(progress, index, call, fingerprint((args, kwargs), self.device))
        if low < high:
            self._run_here(call, index, forward, microbatch, progress, args, kwargs)
        if self.stage < plan.num_stages - 1 and index >= plan.last_call[self.stage]:
            raise StageDone
        results = progress.undone.replace(call, progress.results.get(index, {}))
        # The step goes on with streams of its own, whatever the call has drawn, here or elsewhere.
        seed_all(mix(microbatch.seed, index, 2), self.device)
        return call.answer(results, self.device)

    def _check_sequence(self, plan: StepPlan, name: str, index: int) -> None:
        if index < len(plan.calls) and plan.calls[index].name == name:
            return
        error = plan.survey_error
        cause = f" (when it was planned it stopped with {error!r})" if error else ""
        raise StepError(
            f"{plan.step} calls {'self.' + name if name else 'self'} as number {index + 1}; it was "
            f"planned with {len(plan.calls)} call(s): {describe_calls(plan.calls)}{cause}. Which "
            "modules a step calls, and in which order, may not change from batch to batch: call "
            "them always and multiply their loss by 0."
        )

    def _compare(self, progress: Progress, index: int, call: Call, mark: Tensor) -> None:
        if index < len(progress.marks):
            known = progress.marks[index]
            close = torch.isclose(known, mark, 1e-3, 1e-6, equal_nan=True)
            self.mismatches.append((call.label, Readback(~(close | torch.isnan(known)))))
        unknown = torch.full((), math.nan, dtype=torch.float64, device=self.device)
        while len(progress.marks) <= index:
            progress.marks.append(unknown)
        progress.marks[index] = mark

    def _run_here(
        self,
        call: Call,
        index: int,
        forward: Callable[..., Any],
        microbatch: Microbatch,
        progress: Progress,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        plan = microbatch.plan
        progress.busy = True
        try:
            if plan.is_whole(index, self.stage):
                seed_all(mix(microbatch.seed, index), self.device)
                out = self._run(plan, index, forward, args, kwargs, progress)
                self._finish(call, index, out, progress)
                return
            given = signature_of(args, kwargs)
            if given != call.signature:
                raise call.other_arguments(given)
            self._run_part(call, index, microbatch, progress, pytree.tree_leaves((args, kwargs)))
        finally:
            progress.busy = False

    def _run(
        self,
        plan: StepPlan,
        index: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        progress: Progress,
    ) -> Any:
        # A compiled function would be compiled again where modules are patched in another way.
        with patched(progress.unpatched):
            return self._execute(plan, index, function, args, kwargs)

    def _run_part(
        self, call: Call, index: int, microbatch: Microbatch, progress: Progress, inputs: Any
    ) -> None:
        plan = microbatch.plan
        program = call.program
        assert program is not None
        # Without arguments no code of the step has run on this stage.
        changed = program.changed_settings() if inputs is not None else ()
        if changed:
            where, attribute, before, now = changed[0]
            path = ".".join(part for part in (call.name, where, attribute) if part)
            raise StepError(
                f"self.{path} is {now!r}, but was {before!r} when the batch began, and the forward "
                "was recorded with that. Set it in a hook in front of the step, or make it a "
                "buffer or an argument of the module."
            )
        low, high = plan.cuts[index][self.stage], plan.cuts[index][self.stage + 1]
        received = progress.live.get(index, {})
        carried = tuple(received[value] for value in program.live[low]) if low else ()
        # The rest of a cut call draws numbers of its own: the first part's would repeat its masks.
        seed_all(mix(microbatch.seed, index, self.stage if low else 0, 1), self.device)
        part = plan.part(index, self.stage)
        used = [value if at in part.positions else None for at, value in enumerate(inputs or ())]
        out = self._run(plan, index, part.function, (carried, used), {}, progress)
        if high == call.num_pieces:
            self._finish(call, index, out, progress)
        else:
            progress.live[index] = dict(zip(program.live[high], out, strict=True))

    def _finish(self, call: Call, index: int, out: Any, progress: Progress) -> None:
        leaves = pytree.tree_leaves(out)
        for value, known in zip(leaves, call.outputs, strict=True):
            if isinstance(known, PLAIN) and not isinstance(known, TensorMeta) and known != value:
                raise StepError(
                    f"{call.label} returned {value!r} where {known!r} was planned: only tensors "
                    "reach later stages. Return it as a tensor."
                )
        progress.results[index] = {j: t for j, t in enumerate(leaves) if isinstance(t, Tensor)}
