"""Recording a module's call, opening no more modules than its stages need."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting.cost import (
    CostMode,
    Profile,
    Rates,
    choose_leaves,
    default_rates,
)
from lightning_pipeline.splitting.effects import can_be_kept, installs_hooks
from lightning_pipeline.splitting.ir import StateRef
from lightning_pipeline.splitting.pictures import Change, redo, undo
from lightning_pipeline.splitting.profiler import Profiler
from lightning_pipeline.splitting.program import Program
from lightning_pipeline.splitting.recorder import Recorder
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.tape import RecordingError, Saved
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.splitting.watch import Watch, module_at

log = logging.getLogger(__name__)

Once: TypeAlias = tuple[Program, list[RecordingError], list[Change]]
"""A recording, what it would do once only as errors, and what this changes."""

MAX_RETRIES = 64
"""Bound on the modules that one recording gives up to open."""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave cycles of objects for later; nearly all that a recording makes lives to its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def record(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    forward: Callable[..., Any] | None = None,
    num_stages: int,
    leaves: frozenset[str] | None = None,
    uncut: tuple[type[nn.Module], ...] = (),
    device: torch.device | None = None,
    rates: Rates | None = None,
    counts_saved: bool = False,
) -> Program:
    """Run a module's forward once on stand-ins and return what it computes, in pieces.

    The module, its weights, attributes, hooks and the random generators are as before afterwards.
    The recording holds for the training flags, the signature of the arguments and the ambient
    state (autograd, autocast) of this call. The outermost module's own hooks are not part of it.

    Args:
        module: Module with real weights, weights on meta, or placeholders; only metadata is read.
        args: Positional arguments.
        kwargs: Keyword arguments.
        forward: What to run in place of ``module.forward``.
        num_stages: Number of stages, at least 1; a submodule is opened only if its cost is worth
            mentioning against that of one stage.
        leaves: ``leaves`` of an earlier recording of this module, to get the same pieces.
        uncut: Classes of submodules that are not opened.
        device: Device of the stages; constants of the recording are made for it.
        rates: Speed of the device; by default that of its type.
        counts_saved: Whether to note what autograd saves, in each node.

    Raises:
        SplitError: The outermost forward itself cannot be recorded.
    """
    device = torch.device("cpu") if device is None else torch.device(device)
    rates = default_rates(device) if rates is None else rates
    if forward is None:
        # the inside of a compiled module; its wrapper has no forward to look into
        forward = getattr(module, "_orig_mod", module.forward)
    kept_whole: dict[str, str] = {}
    if leaves is None:
        profile = profile_call(module, args, kwargs, forward, device)
        whole = (name for name, child in module.named_modules() if isinstance(child, uncut))
        profile.whole.update(dict.fromkeys(whole, "the user wants it in one piece"))
        leaves = choose_leaves(module, profile, num_stages, rates)
        kept_whole.update(profile.whole)
    draws = False
    for _ in range(MAX_RETRIES):

        def once(leaves: frozenset[str] = leaves) -> Once:
            call = module, args, kwargs, forward
            return _record_once(*call, leaves, kept_whole, device, rates, counts_saved)

        try:
            program = _settled(once)
        except RecordingError as error:
            draws |= error.draws
            leaves = _give_up(module, leaves, kept_whole, error)
        else:
            program.draws_outside_torch = draws
            return program
    raise SplitError("", f"{MAX_RETRIES} modules cannot be opened", "Keep it on one stage")


def profile_call(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    forward: Callable[..., Any],
    device: torch.device,
) -> Profile:
    """Cost of each submodule in one call."""
    with _counting_versions():
        sandbox, cost = Sandbox(module, device), CostMode()
        profiler = Profiler(sandbox, cost)
        stand_in_args, stand_in_kwargs = _stand_in_arguments(sandbox, args, kwargs)
        with sandbox.open(profiler), sandbox.fake, cost:
            profiler.record(forward, stand_in_args, stand_in_kwargs)
    return profiler.profile


def _record_once(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    forward: Callable[..., Any],
    leaves: frozenset[str],
    kept_whole: dict[str, str],
    device: torch.device,
    rates: Rates,
    counts_saved: bool,
) -> Once:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_counting_versions())
        sandbox, cost = Sandbox(module, device), CostMode()
        saved = Saved(sandbox.storage_names) if counts_saved else None
        if saved is not None:
            stack.enter_context(saved.hooks())
        recorder = Recorder(sandbox, cost, leaves)
        tape = recorder.tape
        tape.saved = saved
        call = _stand_in_arguments(sandbox, args, kwargs)
        inputs: list[tuple[int, int]] = []
        for position, leaf in enumerate(pytree.tree_leaves(call)):
            if isinstance(leaf, Tensor) and id(leaf) not in tape.refs:
                inputs.append((position, tape.new_value(leaf, -1)))
        with sandbox.open(recorder), sandbox.fake, cost:
            with recorder:
                out = recorder.record(forward, *call)
            errors, changes = recorder.finish()
            tape.stack.append("")
            out_leaves, spec = pytree.tree_flatten(out)
            outputs = [_output(recorder, leaf) for leaf in out_leaves]
        tape.refresh()
        reads = {("", "forward"): None, **recorder.effects.reads}
        watch = Watch(module, reads, recorder.effects.others)
        watch.look()
        program = Program(
            module,
            tape.nodes,
            tape.values,
            inputs,
            outputs,
            spec,
            leaves=leaves,
            kept_whole=dict(kept_whole),
            settings=watch.values,
            others=recorder.effects.others,
            storage_names=sandbox.storage_names,
            rates=rates,
        )
        program.constants = {
            (where, name): value
            for where, name in reads
            if (child := module_at(module, where)) is not None
            and isinstance(value := child.__dict__.get(name), Tensor)
            and id(value) in tape.constants
        }
    return program, errors, changes


def _settled(once: Callable[[], Once]) -> Program:
    """A recording that says of every later call what it says of this one.

    A forward may change something at its first call alone, as one does that fills in its own
    configuration. It is recorded again with this change, which must not change what it computes.

    Raises:
        RecordingError: It changes something at each call.
    """
    program, errors, changes = once()
    if not errors:
        return program
    if can_be_kept(changes):
        redo(changes)
        try:
            again, still, _ = once()
        finally:
            undo(changes)
        if not still and again.does_as(program):
            if installs_hooks(changes):  # where this forward never runs they would only pile up
                return program
            again.changes = changes
            return again
    raise errors[0]


@contextlib.contextmanager
def _counting_versions() -> Iterator[None]:
    """Leave inference mode, whose tensors count no versions, with autograd as it was."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _stand_in_arguments(
    sandbox: Sandbox, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    made: dict[int, Tensor] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = sandbox.stand_in_for(leaf, as_input=True)
        return made[id(leaf)]

    return pytree.tree_map(stand_in, (args, kwargs))


def _output(recorder: Recorder, leaf: Any) -> Any:
    """Template of one leaf of the output; a bare parameter or constant becomes a value."""
    ref = recorder.tape.template(leaf)
    if isinstance(leaf, Tensor) and (isinstance(ref, (StateRef, Tensor))):
        with recorder:
            leaf = leaf.view_as(leaf)
        ref = recorder.tape.template(leaf)
    return ref


def _give_up(
    module: nn.Module,
    leaves: frozenset[str],
    kept_whole: dict[str, str],
    error: RecordingError,
) -> frozenset[str]:
    """Leaves for another attempt: the module at fault whole, or those that leak tensors exposed.

    Raises:
        RecordingError: There is nothing left to change.
    """
    if error.made_in:
        exposed = expose(module, leaves, error.made_in)
        if exposed != leaves:
            return exposed
    if not error.module or error.module in leaves:
        raise error
    log.info("%s; it is kept whole", error)
    kept_whole[error.module] = str(error)
    return leaves | {error.module}


def expose(module: nn.Module, leaves: frozenset[str], name: str) -> frozenset[str]:
    """Leaves changed so that all modules of one class are called from opened modules.

    Their outputs then have an identity, by whatever way they reach their users.

    Args:
        module: The outermost module.
        leaves: Leaves so far.
        name: A module of that class.
    """
    kind = type(module.get_submodule(name))
    exposed = set(leaves)
    for found, child in module.named_modules():
        if type(child) is not kind or not found:
            continue
        for ancestor in itertools.accumulate(found.split(".")[:-1], "{}.{}".format):
            if ancestor in exposed:
                exposed.discard(ancestor)
                exposed.update(_called_children(ancestor, module.get_submodule(ancestor)))
        exposed.add(found)
    return frozenset(exposed)


def _called_children(name: str, module: nn.Module) -> Iterator[str]:
    for key, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_children(f"{name}.{key}", child)
        else:
            yield f"{name}.{key}"
