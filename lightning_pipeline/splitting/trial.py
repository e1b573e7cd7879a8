"""Learning a module's output by running it for real, alone, on made-up data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.splitting.cost import CostMode
from lightning_pipeline.splitting.objects import open_dataclasses
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.state import StateItem
from lightning_pipeline.splitting.torch_private import (
    FakeTensor,
    disable_current_modes,
    flush_flat_weights,
    pytree,
    storage_of,
)

SMALL = 0.02
"""Scale of made-up weights, the usual one of an initialisation."""

INTEGERS = (0, 1, 2)
"""Zero is an index of everything, but no length; one is both for nearly everything."""

SHAPE_CURE = (
    "Let the shape of what a module returns follow from the shapes of its arguments, as that of "
    "pad_packed_sequence(..., total_length=x.shape[1]) does"
)


class TrialError(RuntimeError):
    """A module runs neither on stand-ins nor on made-up data."""


def trial_run(
    sandbox: Sandbox,
    cost: CostMode,
    run: Callable[..., Any],
    module: nn.Module,
    args: tuple,
    kwargs: dict,
) -> Any:
    """Run ``module`` on copies of its weights and made-up arguments; return stand-ins.

    It runs twice. What depends on the values, a shape or a Python number, must be the same both
    times, since it becomes part of the recording. Weights that are elsewhere are made up. Whole
    numbers may be indices, lengths or counts: those that the module takes are found by trying.

    Args:
        sandbox: The open sandbox around the recorded module.
        cost: Counts the operations of the first run.
        run: Called as ``run(module, *args, **kwargs)``.
        module: The module whose inside needs values.
        args: Arguments, stand-ins among them.
        kwargs: Keyword arguments likewise.

    Raises:
        TrialError: The two runs disagree.
        Exception: Whatever ``run`` raises on made-up data.
    """
    state = sandbox.state_of(module)
    attributes = [(child, dict(child.__dict__)) for child in module.modules()]
    devices = [sandbox.device] if sandbox.device.type == "cuda" else []

    def run_once(seed: int, integer: int, watch: AbstractContextManager[Any]) -> Any:
        torch.manual_seed(seed)
        values: dict[int, Tensor] = {}
        try:
            values.update(_fill(sandbox, state))
            make = _made_up(sandbox, integer)
            real_args, real_kwargs = pytree.tree_map(make, (args, kwargs))
            with watch:
                return run(module, *real_args, **real_kwargs)
        finally:
            sandbox.written_in_trials.update(_written(state, values, cost))
            _empty(state)

    with disable_current_modes(), torch.random.fork_rng(devices=devices), torch.no_grad():
        outs = _two_runs(run_once, cost)
    for out in outs:
        open_dataclasses(out)
    _poison(sandbox, attributes)
    first, second = (_summary(out) for out in outs)
    if first != second:
        raise TrialError("the shape of the output, or a number in it, depends on values")
    inputs = itertools.chain(pytree.tree_leaves((args, kwargs)), (item.tensor for item in state))
    trained = any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
    needs_grad = torch.is_grad_enabled() and trained

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        fake = sandbox.stand_in_for(leaf.detach())
        return fake.requires_grad_(needs_grad and fake.dtype.is_floating_point)

    return pytree.tree_map(stand_in, outs[0])


def _two_runs(run_once: Callable[..., Any], cost: CostMode) -> list[Any]:
    """Outputs of two runs, with different whole numbers if the module takes more than one."""
    outs: list[Any] = []
    taken, refused = 0, None
    before = cost.work
    for integer in INTEGERS:
        try:
            outs.append(run_once(integer, integer, nullcontext() if outs else cost))
        except Exception as error:
            refused = refused or error
            if not outs:
                cost.work = before
        else:
            if len(outs) == 2:
                return outs
            taken = integer
    if not outs:
        assert refused is not None
        raise refused
    return [*outs, run_once(len(INTEGERS), taken, nullcontext())]


def _made_up(sandbox: Sandbox, integer: int = 0) -> Callable[[Any], Any]:
    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape, dtype, device = leaf.shape, leaf.dtype, sandbox.device
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(shape, dtype=wide, device=device).to(dtype)
        if dtype is torch.bool:
            return torch.rand(shape, device=device) > (0.5 if integer == 1 else -1)
        return torch.full(shape, integer, dtype=dtype, device=device)

    return make


def _fill(sandbox: Sandbox, state: list[StateItem]) -> dict[int, Tensor]:
    """Puts values in the places of stand-ins, and returns them by the stand-ins' identity."""
    make = _made_up(sandbox)
    values: dict[int, Tensor] = {}
    for item in state:
        original = sandbox.originals.get(id(item.tensor), item.tensor)
        if id(item.tensor) not in values:
            if not original.is_meta:
                value = original.detach().to(sandbox.device, copy=True)
            else:
                value = make(item.tensor)
                value = value * SMALL if value.is_floating_point() else value
            is_parameter = isinstance(item.tensor, nn.Parameter)
            values[id(item.tensor)] = nn.Parameter(value, False) if is_parameter else value
        item.entries[item.key] = values[id(item.tensor)]
    for item in state:
        flush_flat_weights(item.owner)
    return values


def _written(state: list[StateItem], values: dict[int, Tensor], cost: CostMode) -> set[int]:
    """The stand-ins, by identity, whose values a run has written to or replaced."""
    return {
        id(item.tensor)
        for item in state
        for value in [values.get(id(item.tensor))]
        if value is not None
        and (
            item.entries.get(item.key) is not value
            or value._version > 0
            or storage_of(value) in cost.written
        )
    }


def _empty(state: list[StateItem]) -> None:
    for item in state:
        item.entries[item.key] = item.tensor
    for item in state:
        flush_flat_weights(item.owner)


def _poison(sandbox: Sandbox, attributes: list[tuple[nn.Module, dict]]) -> None:
    """Whatever the runs left on modules was computed from made-up data: nobody may use it."""

    def poison(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            return sandbox.stand_in_for(leaf.detach())
        return leaf

    for module, before in attributes:
        for key, value in list(module.__dict__.items()):
            # the flat weights of an RNN have just been put back
            if value is not before.get(key) and key != "_flat_weights":
                module.__dict__[key] = pytree.tree_map(poison, value)


def _summary(out: Any) -> tuple[str, list[Any]]:
    leaves, spec = pytree.tree_flatten(out)
    parts = [
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, (bool, int, float, str, type(None)))
        else type(leaf)
        for leaf in leaves
    ]
    return str(spec), parts
