"""What a step calls: its calls of modules with weights, and what flows between them.

The user's step is run once for real on one microbatch. The outermost calls of modules that hold
parameters or buffers are its *calls*; everything else is the step's own code, which runs natively
on every stage and is never recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.batch import copied, leaves
from lightning_pipeline.errors import PipelineError, SplitError, StepError
from lightning_pipeline.merging import Place, detached, numbers_in
from lightning_pipeline.splitting import state_items
from lightning_pipeline.splitting.objects import open_dataclasses
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.analyst import Analyst, LeftBehind, signature_of
from lightning_pipeline.steps.attributes import (
    Path,
    Snapshot,
    Uses,
    attributes_noted,
    refuse_objects,
    untouched,
)
from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.carrying import Observed
from lightning_pipeline.steps.checks import (
    drop_unused_gradients,
    no_calls,
    own_writes,
    refuse_checkpoint,
    refuse_packed,
    with_ways_out,
)
from lightning_pipeline.steps.counters import changed, numbers_of, refuse_counters
from lightning_pipeline.steps.handmade import HandMade
from lightning_pipeline.steps.leftovers import Leftovers, manner_of, modes_of
from lightning_pipeline.steps.means import ClassLoss, has_weight
from lightning_pipeline.steps.patches import past_compilation, patched, silenced, targets
from lightning_pipeline.steps.pending import TensorMeta, tensors
from lightning_pipeline.steps.streams import stream
from lightning_pipeline.steps.taint import Taint, first_uses


@dataclass
class Survey:
    """What one step function does with one signature of microbatch.

    Attributes:
        calls: Calls in order.
        used: Parameters and buffers that the step's own code uses, with the number of calls made
            before the first use.
        writes: Buffers that the step's own code writes to, behind its last call.
        writes_batch: Whether the step writes in place to its batch.
        switches: Whether it leaves the modes of modules or ``requires_grad`` otherwise.
        grown: Where the LightningModule's lists are that the step appends to.
        assigned: Names of the LightningModule's other attributes that the step sets.
        reads: Names of its attributes that the step reads before it sets them, if it does.
        carried: Those that are in both, as they were before and behind the step.
        numbers: Whole numbers that it returns, logs, sets or appends, by their place.
        unsure: Places of those that are 0 and may come to count what is in tensors.
        losses: Losses over classes that it takes; none if it returns a weight with its loss.
        targets: The modules whose calls are cut, with their names.
        by_hand: The stages that the user has made.
        error: What the step raised behind its last call, for later messages.
    """

    calls: list[Call]
    used: dict[str, int]
    writes: frozenset[str]
    writes_batch: bool
    switches: bool
    grown: tuple[Path, ...]
    assigned: tuple[str, ...]
    reads: frozenset[str]
    carried: dict[str, Observed]
    numbers: dict[Place, int]
    unsure: frozenset[Place]
    losses: list[ClassLoss]
    targets: list[tuple[str, nn.Module]]
    by_hand: HandMade | None
    error: Exception | None


class _Surveyor:
    """One run of the step under observation."""

    def __init__(
        self,
        module: LightningModule,
        analyst: Analyst,
        ambient: tuple[Any, ...],
        device: torch.device,
        made_up: bool,
    ) -> None:
        self.module, self.analyst, self.device = module, analyst, device
        self.made_up, self._ambient = made_up, ambient
        self.calls: list[Call] = []
        self.versions: list[list[tuple[Tensor, int]]] = []
        self.arguments: list[list[Tensor]] = []
        self.leaves: list[list[Tensor]] = []
        self.inside, self.running = False, ""
        self._stand_ins = self._make_stand_ins()
        self.taint: Taint | None = None
        self.state: dict[str, Tensor] = {}
        self.logged: dict[str, Any] = {}
        self.leftovers, self._manner = Leftovers(module), manner_of(module)
        analyst.fresh_from = frozenset(
            id(value)
            for child in module.modules()
            for value in child.__dict__.values()
            if isinstance(value, Tensor)
        )

    def _make_stand_ins(self) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
        """Ones for all parameters (without memory) and buffers, whether they are here or not."""
        made: dict[int, Tensor] = {}
        entries: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for _, owner, key, _, tensor in state_items(self.module) if self.made_up else ():
            if id(tensor) not in made:
                one = torch.ones((), dtype=tensor.dtype, device=self.device)
                ones = one.expand(tuple(tensor.shape))
                if not isinstance(tensor, nn.Parameter):
                    ones = ones.clone()  # small, and the step may write to it
                made[id(tensor)] = ones.requires_grad_(tensor.requires_grad)
            entries.append((owner, key, tensor, made[id(tensor)]))
        return entries

    def held(self) -> dict[str, Tensor]:
        return {name: tensor for *_, name, tensor in state_items(self.module)}

    def show_stand_ins(self, shown: bool) -> None:
        for owner, key, own, ones in self._stand_ins:
            owner[key] = ones if shown else own

    def note_log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``self.log``."""
        if self.inside and self.running:
            self.leftovers.logged_in = f"self.{self.running}"
        if not self.inside:
            self.leftovers.look(value)
        self.logged[name] = value

    def wrap(self, name: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return forward(*args, **kwargs)
            assert self.taint is not None
            self.inside, self.taint.off = True, True
            self.show_stand_ins(False)
            try:
                self.running = name
                return self._call(name, module, forward, args, kwargs)
            finally:
                self.inside = self.taint.off = self.taint.inside = False
                self.show_stand_ins(True)

        return observed

    def _call(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        assert self.taint is not None
        refuse_checkpoint(name, module)
        open_dataclasses((args, kwargs))
        depends_on = self.taint.sources((args, kwargs))
        self.leftovers.look((args, kwargs))
        given = [(t, t._version) for t in tensors((args, kwargs))]
        try:
            found = self.analyst.analyse(name, module, forward, args, kwargs)
        except SplitError as error:
            if name or error.depends_on_values:
                raise with_ways_out(error, self.module, name) from error
            raise _LookThrough from error
        if isinstance(found.reason, LeftBehind) and any(c.name == name for c in self.calls):
            raise with_ways_out(found.reason, self.module, name) from found.reason
        call = Call(
            name,
            signature_of(args, kwargs),
            depends_on,
            found.program if found.cuttable else None,
            found.cost,
            found.reads,
            found.writes,
            self.analyst.ambient() != self._ambient or manner_of(self.module) != self._manner,
            found.reason,
            alone=found.alone,
        )
        if self.made_up:
            out = found.made_up_output(name, self.device)
        else:
            held = self.held()
            self.leftovers.begin(name, module, (args, kwargs))
            self.taint.inside = True
            out = found.see(forward(*args, **kwargs))
            self.taint.inside = False
            self.leftovers.end(name, module, out)
            # What a call binds anew is no doing of the step's own code.
            self.state |= {n: t for n, t in self.held().items() if held.get(n) is not t}
        if any(tensor._version != version for tensor, version in given):
            raise StepError(
                f"Call {len(self.calls) + 1} of the step, {call.label}, writes in place to its "
                "argument. A stage that repeats the step would see it unwritten. Start the module "
                "with an operation that is not in place, e.g. nn.ReLU(inplace=False)."
            )
        refuse_packed(call.label, out)
        self.arguments.append(tensors((args, kwargs)))
        return self._answer(call, out)

    def _answer(self, call: Call, out: Any) -> Any:
        """Notes the output and hands the step a copy, which it may write to."""
        leaves, call.output_spec = pytree.tree_flatten(out)
        call.outputs = [TensorMeta.of(x) if isinstance(x, Tensor) else x for x in leaves]
        cut_off = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        fresh = [x.clone() if isinstance(x, Tensor) else x for x in cut_off]
        self.leaves.append([x for x in cut_off if isinstance(x, Tensor)])
        answer = pytree.tree_unflatten(fresh, call.output_spec)
        assert self.taint is not None
        self.taint.mark(answer, call.depends_on | {len(self.calls)})
        self.calls.append(call)
        self.versions.append([(x, x._version) for x in fresh if isinstance(x, Tensor)])
        return answer


@dataclass(frozen=True)
class Request:
    """What to survey.

    Attributes:
        module: The user's LightningModule; weights that are elsewhere are made up.
        step: Name of the step method.
        batch: One microbatch.
        rest: The step's further arguments.
        analyst: Records and prices the called modules.
        context: The precision plugin's context of this step.
        device: The rank's device.
        seed: Seed of the random numbers drawn meanwhile.
        made_up: Answer calls by made-up values instead of running them. Ranks that do not hold
            the same weights then see the same, whatever the step decides by them.
        only: Dotted name of the single module to cut, ``None`` for all that hold weights.
        by_hand: The stages that the user has made.
    """

    module: LightningModule
    step: str
    batch: Any
    rest: tuple[Any, ...]
    analyst: Analyst
    context: Callable[[], AbstractContextManager[Any]]
    device: torch.device
    seed: int
    made_up: bool
    only: str | None = None
    by_hand: HandMade | None = None


def survey(request: Request) -> Survey:
    """Runs a step once to see its calls; nothing of it stays.

    Raises:
        StepError: If the step does something that stages cannot follow.
        SplitError: If a called module cannot be recorded although its weights are elsewhere.
    """
    grad = torch.is_grad_enabled()
    # Out of the inference mode of an evaluation, whose tensors count no versions.
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            return _survey(request, opaque_forward=False)
        except _LookThrough:
            return _survey(request, opaque_forward=True)


class _LookThrough(BaseException):
    """The LightningModule's own forward cannot be recorded: its calls are cut instead."""


def _survey(asked: Request, opaque_forward: bool) -> Survey:
    module, batch = asked.module, copied(asked.batch)
    versions = [(t, t._version) for t in leaves(batch) if isinstance(t, Tensor)]
    cut_at = targets(module, opaque_forward, asked.only)
    if asked.by_hand is not None:
        cut_at = asked.by_hand.targets(cut_at)
    with untouched(module), stream(asked.seed, asked.device), asked.context():
        run = _Surveyor(module, asked.analyst, asked.analyst.ambient(), asked.device, asked.made_up)
        before, counted, modes = Snapshot.of(module), numbers_of(module), modes_of(module)
        run.state = run.held()
        returned, error, uses, taint = _observe(run, asked, batch, cut_at)
        run.leftovers.look(returned)
        run.leftovers.refuse(asked.step)
        writes = own_writes(module, asked.step, run.calls, taint.written, taint.used, run.state)
        after, switches = Snapshot.of(module), modes_of(module) != modes
        grown, assigned = before.grown(after, asked.step), before.assigned(after, uses)
        assigned = refuse_objects(asked.step, assigned, after.attributes, uses)
        made = {
            "output": returned,
            "logs": run.logged,
            "lists": {path: after.lists[path][len(before.lists.get(path, ())) :] for path in grown},
            "attributes": {name: detached(after.attributes[name]) for name in assigned},
        }
        carried = {
            name: Observed(
                uses.read[name],
                value,
                taint.is_made(after.attributes[name]),
                taint.reads_values,
                uses.reads[name],
                name in uses.read_again,
            )
            for name, value in made["attributes"].items()
            if name in uses.read
        }
        drop_unused_gradients(run.calls, run.arguments, run.leaves, returned)
        if error is None and (found := changed(counted, numbers_of(module))):
            _see_again(asked, cut_at, found)
    asked.analyst.keep_changes()
    if not run.calls:
        raise no_calls(module, asked.step, error) from error
    for call, answers in zip(run.calls, run.versions, strict=True):
        call.cloned = any(tensor._version != version for tensor, version in answers)
        call.ambient |= call.program is not None and bool(call.program.changed_settings())
    numbers = numbers_in(made)
    return Survey(
        calls=run.calls,
        used=first_uses(module, taint),
        writes=writes,
        writes_batch=any(tensor._version != version for tensor, version in versions),
        switches=switches,
        grown=grown,
        assigned=assigned,
        reads=frozenset(uses.read),
        carried=carried,
        numbers={place: int(number) for place, number in numbers.items()},
        unsure=frozenset(
            place
            for place, number in numbers.items()
            if not int(number) and (taint.reads_values or isinstance(number, Tensor))
        ),
        losses=[] if has_weight(returned) else taint.losses,
        targets=cut_at,
        by_hand=asked.by_hand,
        error=error,
    )


def _see_again(
    asked: Request, cut_at: list[tuple[str, nn.Module]], found: set[tuple[str, str]]
) -> None:
    """Tells a counter from what is set to the same in each run, by another run like the first."""
    module, numbers = asked.module, numbers_of(asked.module)
    run = _Surveyor(module, asked.analyst, asked.analyst.ambient(), asked.device, asked.made_up)
    with stream(asked.seed, asked.device):
        _observe(run, asked, copied(asked.batch), cut_at)
    now = numbers_of(module)
    refuse_counters(module, asked.step, found & changed(numbers, now), now)


def _observe(
    run: _Surveyor, asked: Request, batch: Any, cut_at: list[tuple[str, nn.Module]]
) -> tuple[Any, Exception | None, Uses, Taint]:
    """What the step returns and raises, how it uses attributes, and what comes from which call."""
    module = asked.module
    changes: list[tuple[object, str, Any]]
    changes = [(child, "forward", run.wrap(name, child)) for name, child in cut_at]
    for _, child in cut_at:
        changes += past_compilation(child, lambda: run.inside)
    if asked.by_hand is not None:
        changes += asked.by_hand.changes()
    changes += [*silenced(module, readable=True), (module, "log", run.note_log)]
    returned, error, uses = None, None, Uses()
    run.show_stand_ins(True)
    taint = run.taint = Taint(module, lambda: len(run.calls), run.leftovers, asked.made_up)
    try:
        eager = torch.compiler.set_stance("force_eager")  # what is compiled is run, not traced
        with eager, patched(changes), taint, attributes_noted(module) as uses:
            returned = getattr(module, asked.step)(batch, *asked.rest)
    except PipelineError:
        raise
    except Exception as raised:  # behind the last call it does no harm; see Runner for before
        error = raised.with_traceback(None)  # its frames would keep the graph alive
    finally:
        run.show_stand_ins(False)
    return returned, error, uses, taint
