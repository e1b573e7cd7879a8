"""What a step calls: its calls of modules with weights, and what flows between them.

The user's step is run once for real on one microbatch. The outermost calls of modules that hold
parameters or buffers are its *calls*; everything else is the step's own code, which runs natively
on every stage and is never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_pipeline.errors import PipelineError, SplitError, StepError
from lightning_pipeline.splitting import Program, canonical_names, is_elsewhere, state_items
from lightning_pipeline.steps.analyst import Analyst, Signature, signature_of
from lightning_pipeline.steps.pending import (
    READS,
    Pending,
    TensorMeta,
    tensors,
    writes_in_place,
)
from lightning_pipeline.steps.streams import stream

_MISSING = object()


@dataclass
class Call:
    """One call of a module with weights.

    Attributes:
        name: Dotted name of the module; ``""`` is the LightningModule's own forward.
        signature: Structure, shapes and Python values of the arguments.
        depends_on: Indices of the earlier calls that the arguments come from.
        program: The recording to cut, or ``None`` when the call stays in one piece.
        cost: Seconds of each piece.
        reads: Names of the parameters and buffers that each piece uses.
        writes: Names of the buffers that the call writes.
        output_spec: Structure of the output.
        outputs: Leaves of the output, a tensor as its TensorMeta, anything else as itself.
        cloned: Whether the step writes in place to the answer, which therefore is a copy.
        ambient: Autograd and autocast state at the call differs from that of the step's start.
        reason: Why it cannot be recorded, if it cannot.
    """

    name: str
    signature: Signature
    depends_on: frozenset[int]
    program: Program | None
    cost: list[float]
    reads: list[frozenset[str]]
    writes: frozenset[str]
    ambient: bool
    reason: SplitError | None = None
    output_spec: Any = None
    outputs: list[Any] = field(default_factory=list)
    cloned: bool = False

    @property
    def num_pieces(self) -> int:
        return len(self.cost)

    @property
    def label(self) -> str:
        return f"self.{self.name}" if self.name else "self"

    def answer(self, leaves: dict[int, Tensor], device: torch.device) -> Any:
        """The call's output: given tensors where they are known, Pending ones elsewhere."""

        def leaf(position: int, known: Any) -> Any:
            if position in leaves:
                tensor = leaves[position]
                return tensor.clone() if self.cloned else tensor.view_as(tensor)
            return Pending.like(known, device) if isinstance(known, TensorMeta) else known

        flat = [leaf(position, known) for position, known in enumerate(self.outputs)]
        return pytree.tree_unflatten(flat, self.output_spec)


@dataclass
class Survey:
    """What one step function does with one signature of microbatch.

    Attributes:
        calls: Calls in order.
        used: Parameters and buffers that the step's own code uses, with the number of calls made
            before the first use.
        written: Parameters and buffers that the step's own code writes.
        writes_batch: Whether the step writes in place to its batch.
        targets: The modules whose calls are cut, with their names.
        error: What the step raised behind its last call, for later messages.
    """

    calls: list[Call]
    used: dict[str, int]
    written: frozenset[str]
    writes_batch: bool
    targets: list[tuple[str, nn.Module]]
    error: Exception | None


class Taint(TorchFunctionMode):
    """Follows, through the step's own code, which call's outputs a tensor comes from."""

    def __init__(self, module: nn.Module, num_calls: Callable[[], int]) -> None:
        super().__init__()
        self.off = False
        self.used: dict[str, int] = {}
        self.written: set[str] = set()
        self._num_calls = num_calls
        self._sources: dict[int, frozenset[int]] = {}
        self._kept: list[Tensor] = []
        self._read: frozenset[int] = frozenset()
        self._names: dict[int, str] = {}
        self._homes: dict[int, str] = {}
        for _, _, _, name, tensor in state_items(module):
            self._names.setdefault(id(tensor), name)
            self._homes.setdefault(tensor.untyped_storage()._cdata, name)

    def sources(self, tree: Any) -> frozenset[int]:
        """Calls that ``tree`` may depend on, values read into Python included."""
        return self._read.union(*(self._sources.get(id(t), frozenset()) for t in tensors(tree)))

    def mark(self, tree: Any, calls: frozenset[int]) -> None:
        for tensor in tensors(tree):
            self._sources[id(tensor)] = calls | self._sources.get(id(tensor), frozenset())
            self._kept.append(tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.off:
            self._note(getattr(func, "__name__", ""), args, kwargs, out)
        return out

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given, calls = tensors((args, kwargs)), self.sources((args, kwargs))
        writes = writes_in_place(name) and name != "requires_grad_"
        if calls:
            self.mark(out, calls)
            if writes:
                self.mark(args[0], calls)
        if name in READS:
            self._read |= calls
        if writes and isinstance(args[0], Tensor):
            home = self._homes.get(args[0].untyped_storage()._cdata)
            if home is not None:
                self.written.add(home)
        made = [t for t in tensors(out) if not any(t is g for g in given)]
        if made or writes or name in READS:
            for tensor in given:
                if id(tensor) in self._names:
                    self.used.setdefault(self._names[id(tensor)], self._num_calls())


@contextmanager
def patched(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Sets instance attributes for the block, past any ``__setattr__``, and puts them back."""
    undo = []
    for owner, key, value in changes:
        undo.append((owner.__dict__, key, owner.__dict__.get(key, _MISSING)))
        owner.__dict__[key] = value
    try:
        yield
    finally:
        for attributes, key, old in reversed(undo):
            if old is _MISSING:
                attributes.pop(key, None)
            else:
                attributes[key] = old


def targets(
    module: LightningModule, opaque_forward: bool, only: str | None
) -> list[tuple[str, nn.Module]]:
    """The modules whose calls a step is cut at: those with weights, metrics excepted.

    Args:
        module: The user's LightningModule.
        opaque_forward: Look through its own forward at the calls inside it.
        only: The single module to cut; the step's own code uses the weights of the others.
    """
    if only is not None:
        return [(only, module.get_submodule(only))]
    found: list[tuple[str, nn.Module]] = []
    metrics = [name + "." for name, m in module.named_modules() if isinstance(m, Metric)]
    for name, child in module.named_modules():
        inside_metric = isinstance(child, Metric) or any(name.startswith(m) for m in metrics)
        if inside_metric or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            continue
        if (name or not opaque_forward) and next(state_items(child), None) is not None:
            found.append((name, child))
    return found


def silenced(module: LightningModule) -> list[tuple[object, str, Any]]:
    """Patches under which logging and metrics of a step do nothing."""

    def nothing(*args: Any, **kwargs: Any) -> Tensor:
        return Pending.like(TensorMeta((), torch.get_default_dtype(), False), torch.device("cpu"))

    changes: list[tuple[object, str, Any]] = [(module, "log", lambda *args, **kwargs: None)]
    for child in module.modules():
        if isinstance(child, Metric):
            changes += [(child, method, nothing) for method in ("forward", "update", "compute")]
    return changes


def copied(batch: Any) -> Any:
    """``batch`` with every tensor cloned, so that a step may write to it."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch
    )


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Puts back buffers, attributes and the contents of containers on every module."""
    attributes = [(child, dict(child.__dict__)) for child in module.modules()]
    contents = [
        (value, type(value)(value))
        for _, saved in attributes
        for key, value in saved.items()
        if type(value) in (list, dict, set) and not key.startswith("_")
    ]
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not is_elsewhere(b)]
    try:
        yield
    finally:
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        for child, saved in attributes:
            child.__dict__.clear()
            child.__dict__.update(saved)
        with torch.no_grad():
            for buffer, saved_buffer in buffers:
                buffer.copy_(saved_buffer)


class _Surveyor:
    """One run of the step under observation."""

    def __init__(
        self,
        module: LightningModule,
        analyst: Analyst,
        ambient: tuple[Any, ...],
        device: torch.device,
    ) -> None:
        self.module, self.analyst, self.device = module, analyst, device
        self._ambient = ambient
        self.calls: list[Call] = []
        self.versions: list[list[tuple[Tensor, int]]] = []
        self._inside = False
        self._stand_ins = self._make_stand_ins()
        self.taint: Taint | None = None

    def _make_stand_ins(self) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
        """Made-up values for weights that are elsewhere: ones, expanded from a single element."""
        made: dict[int, Tensor] = {}
        entries: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for _, owner, key, _, tensor in state_items(self.module):
            if is_elsewhere(tensor):
                one = torch.ones((), dtype=tensor.dtype, device=self.device)
                grad = tensor.requires_grad
                ones = made.setdefault(
                    id(tensor), one.expand(tuple(tensor.shape)).requires_grad_(grad)
                )
                entries.append((owner, key, tensor, ones))
        return entries

    def show_stand_ins(self, shown: bool) -> None:
        for owner, key, placeholder, ones in self._stand_ins:
            owner[key] = ones if shown else placeholder

    def wrap(self, name: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            assert self.taint is not None
            self._inside, self.taint.off = True, True
            self.show_stand_ins(False)
            try:
                return self._call(name, module, forward, args, kwargs)
            finally:
                self._inside, self.taint.off = False, False
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
        depends_on = self.taint.sources((args, kwargs))
        given = [(t, t._version) for t in tensors((args, kwargs))]
        try:
            found = self.analyst.analyse(name, module, forward, args, kwargs)
        except SplitError as error:
            if name:
                raise
            raise _LookThrough from error
        call = Call(
            name,
            signature_of(args, kwargs),
            depends_on,
            found.program if found.cuttable else None,
            found.cost,
            found.reads,
            found.writes,
            self.analyst.ambient() != self._ambient,
            found.reason,
        )
        if any(is_elsewhere(tensor) for *_, tensor in state_items(module)):
            out = found.made_up_output(name, self.device)
        else:
            out = forward(*args, **kwargs)
        if any(tensor._version != version for tensor, version in given):
            raise StepError(
                f"Call {len(self.calls) + 1} of the step, {call.label}, writes in place to its "
                "argument. A stage that repeats the step would see it unwritten. Start the module "
                "with an operation that is not in place, e.g. nn.ReLU(inplace=False)."
            )
        return self._answer(call, out)

    def _answer(self, call: Call, out: Any) -> Any:
        """Notes the output and hands the step a copy, which it may write to."""
        leaves, call.output_spec = pytree.tree_flatten(out)
        call.outputs = [TensorMeta.of(x) if isinstance(x, Tensor) else x for x in leaves]
        fresh = [
            x.detach().requires_grad_(x.requires_grad).clone() if isinstance(x, Tensor) else x
            for x in leaves
        ]
        answer = pytree.tree_unflatten(fresh, call.output_spec)
        assert self.taint is not None
        self.taint.mark(answer, call.depends_on | {len(self.calls)})
        self.calls.append(call)
        self.versions.append([(x, x._version) for x in fresh if isinstance(x, Tensor)])
        return answer


def survey(
    module: LightningModule,
    step: str,
    batch: Any,
    rest: tuple[Any, ...],
    *,
    analyst: Analyst,
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    seed: int,
    only: str | None = None,
) -> Survey:
    """Runs ``module.<step>(batch, *rest)`` once to see its calls; nothing of it stays.

    Args:
        module: The user's LightningModule; weights that are elsewhere are made up.
        step: Name of the step method.
        batch: One microbatch.
        rest: The step's further arguments.
        analyst: Records and prices the called modules.
        context: The precision plugin's context of this step.
        device: The rank's device.
        seed: Seed of the random numbers drawn meanwhile.
        only: Dotted name of the single module to cut, ``None`` for all that hold weights.

    Raises:
        StepError: If the step does something that stages cannot follow.
        SplitError: If a called module cannot be recorded although its weights are elsewhere.
    """
    try:
        return _survey(module, step, batch, rest, analyst, context, False, device, seed, only)
    except _LookThrough:
        return _survey(module, step, batch, rest, analyst, context, True, device, seed, only)


class _LookThrough(BaseException):
    """The LightningModule's own forward cannot be recorded: its calls are cut instead."""


def _survey(
    module: LightningModule,
    step: str,
    batch: Any,
    rest: tuple[Any, ...],
    analyst: Analyst,
    context: Callable[[], AbstractContextManager[Any]],
    opaque_forward: bool,
    device: torch.device,
    seed: int,
    only: str | None,
) -> Survey:
    batch = copied(batch)
    batch_versions = [(t, t._version) for t in tensors(batch)]
    error: Exception | None = None
    with untouched(module), stream(seed, device), context():
        run = _Surveyor(module, analyst, analyst.ambient(), device)
        run.taint = Taint(module, lambda: len(run.calls))
        cut_at = targets(module, opaque_forward, only)
        wrapped = [(m, "forward", run.wrap(n, m)) for n, m in cut_at]
        run.show_stand_ins(True)
        try:
            with patched([*wrapped, *silenced(module)]), run.taint:
                getattr(module, step)(batch, *rest)
        except PipelineError:
            raise
        except Exception as raised:  # behind the last call it does no harm; see Runner for before
            error = raised
        finally:
            run.show_stand_ins(False)
    if not run.calls:
        raise _no_calls(module, step, error) from error
    canonical = canonical_names(module)
    _refuse_writes(step, run, canonical)
    for call, versions in zip(run.calls, run.versions, strict=True):
        call.cloned = any(tensor._version != version for tensor, version in versions)
    used: dict[str, int] = {}
    for name, before in run.taint.used.items():
        used[canonical[name]] = min(before, used.get(canonical[name], before))
    written = frozenset(canonical[name] for name in run.taint.written)
    writes_batch = any(tensor._version != version for tensor, version in batch_versions)
    return Survey(run.calls, used, written, writes_batch, cut_at, error)


def _no_calls(module: LightningModule, step: str, error: Exception | None) -> StepError:
    """The error for a step that never gets to a module with weights."""
    name = type(module).__name__
    if error is not None:
        return StepError(
            f"{name}.{step} raised {error!r} before it called any module that holds parameters, "
            "so there is nothing to pipeline. Make the step run on one device first: "
            "Trainer(devices=1)."
        )
    return StepError(
        f"{name}.{step} calls no module that holds parameters, so there is nothing to pipeline. "
        "A pipeline needs a step that calls its model, e.g. `self(x)` or `self.model(x)`."
    )


def _refuse_writes(step: str, run: _Surveyor, canonical: dict[str, str]) -> None:
    assert run.taint is not None
    in_calls = frozenset().union(*(piece for call in run.calls for piece in call.reads))
    both = sorted({canonical[name] for name in run.taint.written} & in_calls)
    if both:
        raise StepError(
            f"{step} itself writes to {both[0]!r} ({len(both)} tensor(s) in all), which belongs to "
            "a module that it calls: stages that stop before this line would miss it. Move it to a "
            "hook behind the step, e.g. on_train_batch_end."
        )


__all__ = ["Call", "SplitError", "Survey", "copied", "patched", "silenced", "survey", "targets"]
