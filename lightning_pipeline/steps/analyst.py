"""Records and prices the modules that a step calls, once per signature."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.cache import Cache
from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting import (
    Program,
    Rates,
    ValueRef,
    canonical_names,
    record,
    state_items,
    version_of,
)
from lightning_pipeline.splitting.ambient import ambient_settings
from lightning_pipeline.splitting.pictures import Change, redo
from lightning_pipeline.splitting.torch_private import (
    pytree,
    saved_tensor_hooks,
    without_saved_tensor_hooks,
)
from lightning_pipeline.steps.attributes import class_patched
from lightning_pipeline.steps.handmade import is_by_hand
from lightning_pipeline.steps.leftovers import PLAIN, modes_of
from lightning_pipeline.steps.pending import TensorMeta

Signature = tuple[str, tuple[Any, ...]]
_CACHED_RECORDINGS = 256
_VERSIONS = 8  # recordings of one call, for other values of what they read


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Structure of a call's arguments: shapes of tensors, plain values, types of all else."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype, value.requires_grad
        return value if isinstance(value, PLAIN) else type(value)

    flat = [*args, *kwargs.values()]
    if all(isinstance(value, (Tensor, *PLAIN)) for value in flat):
        return _structure(len(args), tuple(kwargs)), tuple(map(leaf, flat))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(map(leaf, leaves))


@cache
def _structure(count: int, keywords: tuple[str, ...]) -> str:
    """Structure of arguments none of which is a container."""
    return str(pytree.tree_flatten(((0,) * count, dict.fromkeys(keywords, 0)))[1])


@dataclass
class Analysis:
    """What is known of a call.

    Attributes:
        program: Its recording, ``None`` if it cannot be recorded.
        cuttable: Whether the recording may be cut.
        cost: Seconds of each piece.
        reads: Parameters and buffers of each piece, by their names in the LightningModule.
        writes: Buffers that it writes.
        reason: Why it cannot be recorded.
        seen: Structure and leaves of the output, a tensor as its TensorMeta, if it has been run.
        alone: Recording that does not look into a module that is not cut, to measure its time.
    """

    program: Program | None
    cuttable: bool
    cost: list[float]
    reads: list[frozenset[str]]
    writes: frozenset[str]
    reason: SplitError | None = None
    seen: tuple[Any, list[Any]] | None = None
    alone: Program | None = None

    def see(self, out: Any) -> Any:
        """Notes what the call gives, which it returns."""
        leaves, spec = pytree.tree_flatten(out)
        self.seen = spec, [TensorMeta.of(x) if isinstance(x, Tensor) else x for x in leaves]
        return out

    def made_up_output(self, name: str, device: torch.device) -> Any:
        """Values of the output's shapes, for a rank that does not hold the weights."""
        if self.seen is not None:
            spec, outputs = self.seen
            ones = [
                out.fill(1, device).requires_grad_(out.requires_grad)
                if isinstance(out, TensorMeta)
                else out
                for out in outputs
            ]
            return pytree.tree_unflatten(ones, spec)
        if self.program is None:
            assert self.reason is not None
            raise SplitError(
                name,
                "it has to be planned for a new input signature after its weights were placed, "
                f"and it cannot be recorded ({self.reason.reason})",
                "Give all batches the same shape, or move the code at fault into a submodule.",
                self.reason.location,
            )
        program = self.program

        def leaf(output: Any) -> Any:
            if not isinstance(output, ValueRef):
                return output
            value = program.values[output.id]
            ones = torch.ones(value.shape, dtype=value.dtype, device=device)
            return ones.requires_grad_(value.requires_grad)

        return pytree.tree_unflatten(map(leaf, program.output_metas), program.output_spec)


class LeftBehind(SplitError):
    """A module reads a tensor that the same step has left in one of its attributes."""


class Analyst:
    """Recordings of a LightningModule's called modules.

    Args:
        root: The LightningModule.
        num_stages: Number of stages that the pieces must be small enough for.
        device: Device that the recorded code runs on.
        leaves: Where earlier recordings of each called module stopped, shared with them, so that
            all recordings of a module have the same pieces.
        uncut: Classes of modules that stay in one piece.
        rates: Speed of the device; by default that of its type.
        counts_saved: Whether recordings note what autograd saves.
        is_timed: Whether what is not cut gets a recording to measure its time by.

    Attributes:
        fresh_from: Identities of the tensors that were attributes of modules before the step.
    """

    def __init__(
        self,
        root: nn.Module,
        num_stages: int,
        device: torch.device,
        leaves: dict[str, frozenset[str]] | None = None,
        uncut: tuple[type[nn.Module], ...] = (),
        rates: Rates | None = None,
        counts_saved: bool = False,
        is_timed: bool = False,
    ) -> None:
        self._root, self._num_stages, self._device = root, num_stages, device
        self._canonical = canonical_names(root)
        self._memo: Cache[Analysis] = Cache(_CACHED_RECORDINGS, _VERSIONS)
        self._changes: list[Change] = []
        self.fresh_from: frozenset[int] | None = None
        self.leaves, self.uncut = {} if leaves is None else leaves, uncut
        self._rates, self._counts_saved = rates, counts_saved
        self.is_timed = is_timed

    def ambient(self) -> tuple[Any, ...]:
        """Autograd and autocast state of this moment."""
        return ambient_settings()

    def analyse(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Analysis:
        """The pieces of ``module(*args, **kwargs)``; see :class:`Analysis`."""
        checkpointing = saved_tensor_hooks() is not None
        modes = modes_of(module)
        arguments, settings = signature_of(args, kwargs), plain_settings(module)
        key = (name, arguments, modes, self.ambient(), checkpointing, settings)
        return self._memo.get(
            key,
            lambda: self._timed(
                self._record(name, module, forward, args, kwargs, checkpointing),
                module,
                args,
                kwargs,
            ),
            lambda known: known.program is None or not known.program.changed_settings(),
        )

    def _timed(
        self,
        found: Analysis,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Analysis:
        if self.is_timed and not found.cuttable:
            found.alone = self._record_as_one(module, args, kwargs)
        return found

    def keep_changes(self) -> None:
        """Makes again what forwards change at their first call alone, on every rank alike.

        A survey takes back all that its step changes; recorded forwards would not do it again.
        """
        redo(self._changes)
        self._changes = []

    def _record(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        checkpointing: bool,
    ) -> Analysis:
        if is_by_hand(name):
            program = self._record_as_one(module, args, kwargs)
            cost = self._weight_cost(module) if program is None else float(sum(program.cost))
            return self._whole(module, program, cost, None)
        try:
            own: AbstractContextManager[None] = nullcontext() if name else _own_forward(module)
            with own, without_saved_tensor_hooks():
                program = record(
                    module,
                    args,
                    kwargs,
                    forward=forward,
                    num_stages=self._num_stages,
                    leaves=self.leaves.get(name),
                    uncut=self.uncut,
                    device=self._device,
                    rates=self._rates,
                    counts_saved=self._counts_saved,
                )
            self._refuse_fresh(program)
        except SplitError as error:
            if not name:
                raise
            warnings.warn(f"{name} stays in one piece. {error}", stacklevel=2)
            whole = self._record_as_one(module, args, kwargs)
            return self._whole(module, whole, self._weight_cost(module), error)
        self.leaves[name] = program.leaves
        redo(program.changes)
        self._changes += program.changes
        # An object among the arguments may change unseen, and the recomputation of a checkpoint
        # around the call needs all of it.
        leaves = pytree.tree_leaves((args, kwargs))
        opaque = any(not isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)
        has_children = next(module.children(), None) is not None
        opaque |= isinstance(module, self.uncut)
        if checkpointing or opaque or not has_children or not program.num_pieces:
            return self._whole(module, program, float(sum(program.cost)), None)
        names = self._names(module)
        return Analysis(
            program,
            True,
            [float(cost) for cost in program.cost],
            [frozenset(names[entry] for entry in piece) for piece in program.reads],
            frozenset(names[entry] for piece in program.writes for entry in piece),
        )

    def _refuse_fresh(self, program: Program) -> None:
        """Refuses to burn in a tensor that the step itself has made an attribute.

        Raises:
            LeftBehind: Naming it.
        """
        known = self.fresh_from
        for (where, attribute), tensor in program.constants.items():
            if known is not None and id(tensor) not in known:
                raise LeftBehind(
                    where,
                    f"it reads the tensor {attribute!r}, which the step or a call of it has left",
                    "Pass it to the forward as an argument to have the module cut",
                )

    def _record_as_one(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program | None:
        """A recording that does not look into ``module``, for what its output is like."""
        try:
            leaves = frozenset({"inner"})
            with without_saved_tensor_hooks():
                return record(
                    _Holder(module),
                    args,
                    kwargs,
                    num_stages=1,
                    leaves=leaves,
                    device=self._device,
                    rates=self._rates,
                    counts_saved=self._counts_saved,
                )
        except SplitError:
            return None

    def _whole(
        self,
        module: nn.Module,
        program: Program | None,
        cost: float,
        reason: SplitError | None,
    ) -> Analysis:
        names = self._names(module)
        weights = {
            item.name for item in state_items(module) if isinstance(item.tensor, nn.Parameter)
        }
        buffers = names.keys() - weights if module.training else ()
        writes = frozenset(names[entry] for entry in buffers)
        return Analysis(program, False, [cost], [frozenset(names.values())], writes, reason)

    def _names(self, module: nn.Module) -> dict[str, str]:
        """What the LightningModule calls each entry of ``module``.

        By identity: a module may be registered in two places, and stages made by hand in none.
        """
        known = {id(tensor): self._canonical[name] for *_, name, tensor in state_items(self._root)}
        return {item.name: known[id(item.tensor)] for item in state_items(module)}

    @staticmethod
    def _weight_cost(module: nn.Module) -> float:
        """A guess for a module that cannot be recorded: reading its weights once."""
        return sum(tensor.numel() * 8e-10 for *_, tensor in state_items(module))


class _Holder(nn.Module):
    """Calls one module, which a recording of the holder need not look into."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@contextmanager
def _own_forward(module: nn.Module) -> Iterator[None]:
    """Refuses a LightningModule's own forward that logs: recorded, it would do so once only."""
    kind = type(module)
    original = kind.__getattribute__

    def get(self: Any, name: str) -> Any:
        if self is module and name in ("log", "log_dict"):
            raise SplitError(
                "", f"it calls self.{name}", "Log in the step, behind the call of the model."
            )
        return original(self, name)

    with class_patched(kind, {"__getattribute__": get}):
        yield


def plain_settings(module: nn.Module) -> tuple[Any, ...]:
    """Attributes of all modules below that a recording burns in: plain ones, and tensors by id."""
    return tuple(
        (name, key, (id(value), version_of(value)) if isinstance(value, Tensor) else value)
        for name, child in module.named_modules()
        for key, value in child.__dict__.items()
        if (type(value) in (bool, int, float, str) and key != "training")
        or isinstance(value, Tensor)
    )
