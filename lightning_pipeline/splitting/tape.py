"""Identities of tensors during a recording, and the list of nodes that it writes."""

from __future__ import annotations

import enum
import itertools
import types
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting.cost import CostMode
from lightning_pipeline.splitting.frames import definition_location, user_location
from lightning_pipeline.splitting.ir import Node, StateRef, TreeRef, Value, ValueRef, state_refs
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.torch_private import DisableTorchFunction, pytree, storage_of

CONSTANT_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    range,
    type,
    type(...),
    np.generic,
    types.FunctionType,
    types.BuiltinFunctionType,
    nn.Module,
    torch.Generator,
)

SEARCH_DEPTH = 4
"""How deep an unknown object is searched for tensors."""


class RecordingError(SplitError):
    """A module cannot be opened; what the caller of the recording may do about it.

    Attributes:
        made_in: Submodule that made a tensor which left it by another way than its return value.
        draws: Whether the module draws from Python's or NumPy's generator.
    """

    made_in: str | None = None
    draws: bool = False


class Saved:
    """What autograd saves while a forward is recorded, storage by storage.

    Args:
        known: Storages of parameters and buffers, which are there anyway.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._kept: list[Tensor] = []  # so that no number is given twice
        self._new: dict[int, int] = {}

    def hooks(self) -> AbstractContextManager[None]:
        """Notes what is saved in the block, of which no backward can run."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda packed: packed)

    def _note(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage not in self._known:
            self._kept.append(tensor.detach())
            self._new[storage] = tensor.untyped_storage().nbytes()

    def take(self) -> dict[int, int]:
        """Bytes of the storages that were saved since the last call."""
        new, self._new = self._new, {}
        return new


class Before:
    """The tensors that a call is given, and how they were before it."""

    def __init__(self, cost: CostMode, args: tuple, kwargs: dict) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        self.tensors = [t for t in leaves if isinstance(t, Tensor)]
        self.marks = marks(self.tensors)
        self.cost, self.work = cost, cost.work
        cost.random = False
        cost.written.clear()

    def written(self) -> list[Tensor]:
        """Those that the call wrote to, or whose requires_grad it changed."""
        flags = are_written(self.tensors, self.marks, self.cost)
        return [t for t, is_written in zip(self.tensors, flags, strict=True) if is_written]


Mark: TypeAlias = tuple[int, bool]
"""What changes when a tensor is written in place; tensors of inference count no versions."""


def marks(tensors: list[Tensor]) -> list[Mark]:
    """A mark for each tensor."""
    with DisableTorchFunction():  # past the recorder, which has no part in this
        return [(-1 if t.is_inference() else t._version, t.requires_grad) for t in tensors]


def are_written(tensors: list[Tensor], before: list[Mark], cost: CostMode) -> list[bool]:
    """Whether each tensor was written since its mark."""
    now = marks(tensors)
    return [
        mark != then or (mark[0] < 0 and storage_of(tensor) in cost.written)
        for tensor, mark, then in zip(tensors, now, before, strict=True)
    ]


class Tape:
    """Values, nodes and references of one recording.

    Every tensor that was seen is kept alive to the end, because ids are reused.

    Attributes:
        stack: Dotted names of the opened modules that run at the moment.
        constants: Identities of the tensors that were there before and are burnt in.
        saved: What autograd saves, if that is counted.
    """

    def __init__(self, sandbox: Sandbox, cost: CostMode) -> None:
        self.sandbox, self.cost = sandbox, cost
        self.saved: Saved | None = None
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.tensors: list[Tensor] = []
        self.stack: list[str] = []
        self.refs: dict[int, ValueRef | StateRef] = {}
        self.constants: set[int] = set()
        for stand_in in sandbox.stand_ins.values():
            self.refs[id(stand_in)] = StateRef(sandbox.state_names[id(stand_in)])

    def fail(
        self,
        reason: str,
        cure: str,
        location: tuple[str, int] | None = None,
        module: str | None = None,
    ) -> RecordingError:
        """The error to raise for the module that is running, at the line that is running."""
        where = module if module is not None else self.stack[-1] if self.stack else ""
        if location is None:
            location = user_location() or definition_location(
                self.sandbox.module.get_submodule(where)
            )
        return RecordingError(where, reason, cure, location)

    def new_value(self, tensor: Tensor, node: int) -> int:
        """Give ``tensor`` an identity; -1 as ``node`` stands for an input."""
        number = len(self.values)
        with DisableTorchFunction():
            shape, dtype = tuple(tensor.shape), tensor.dtype
            self.values.append(Value(node, shape, dtype, tensor.requires_grad, storage_of(tensor)))
        self.refs[id(tensor)] = ValueRef(number)
        self.tensors.append(tensor)
        return number

    def refresh(self) -> None:
        """Take over what in-place operations changed after a value was made."""
        for value, tensor in zip(self.values, self.tensors, strict=True):
            value.requires_grad = tensor.requires_grad

    def template(self, x: Any) -> Any:
        """``x`` with each tensor replaced by the reference that finds it at run time."""
        if isinstance(x, Tensor):
            return self._tensor_template(x)
        if type(x) in (list, tuple):
            return type(x)(self.template(part) for part in x)
        if type(x) is dict:
            return {key: self.template(part) for key, part in x.items()}
        if isinstance(x, slice):
            return slice(*(self.template(part) for part in (x.start, x.stop, x.step)))
        if isinstance(x, CONSTANT_TYPES):
            return x
        leaves, spec = pytree.tree_flatten(x)
        if not (len(leaves) == 1 and leaves[0] is x):
            return TreeRef([self.template(leaf) for leaf in leaves], spec)
        if holds_tensor(x):
            raise self.fail(
                f"an object of type {type(x).__name__} carries tensors between modules",
                "Pass the tensors themselves (for a cache of Hugging Face: use_cache=False)",
            )
        return x

    def _tensor_template(self, tensor: Tensor) -> Any:
        ref = self.refs.get(id(tensor))
        if ref is None and id(tensor) in self.sandbox.stand_ins:
            ref = self.refs[id(self.sandbox.stand_ins[id(tensor)])]
        if ref is not None:
            return ref
        if not self.sandbox.is_lost(tensor):
            self.constants.add(id(tensor))
            return tensor  # it existed before: a constant
        made_in = self.cost.made.get(id(tensor))
        source = f"submodule {made_in!r}" if made_in else "an operation that cannot be followed"
        error = self.fail(
            f"it uses a tensor that came out of {source} by another way than a return value "
            "(stored on an object, collected by a hook, or computed by autograd)",
            "Return the tensor from the module that makes it",
        )
        error.made_in = made_in
        raise error

    def check_output(self, name: str, out: Any) -> None:
        """Refuses objects among what submodule ``name`` returns."""
        for leaf in pytree.tree_leaves(out):
            if not isinstance(leaf, (Tensor, *CONSTANT_TYPES)):
                raise self.fail(
                    f"submodule {name!r} returns an object of type {type(leaf).__name__}",
                    "Return tensors (for a cache of Hugging Face: use_cache=False)",
                )

    def add(self, node: Node, before: Before, out: Any, view: Callable[[Tensor], Tensor]) -> Any:
        """Append ``node`` with the outputs that are found in ``out``.

        Args:
            node: The node, complete but for its outputs, its costs and what it writes.
            before: State of its arguments before the call.
            out: What the call returned.
            view: Makes a view of a tensor without recording it.

        Returns:
            ``out``, with new tensors in place of those that were known before: a call that does
            nothing now (dropout in evaluation) must not make its users skip it.
        """
        written = before.written()
        self._note_writes(node, written)
        node.random |= self.cost.random
        node.work = self.cost.work - before.work
        if self.saved is not None:
            node.saved = self.saved.take()
        leaves, spec = pytree.tree_flatten(out)
        known = {id(t) for t in before.tensors}
        dirty = {storage_of(t) for t in written}
        replaced = False
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) in known or id(leaf) in self.refs:
                if storage_of(leaf) in dirty:
                    continue  # written in place: still the same value
                leaf = leaves[position] = view(leaf)
                replaced = True
            node.outputs.append((position, self.new_value(leaf, len(self.nodes))))
        self.nodes.append(node)
        return pytree.tree_unflatten(leaves, spec) if replaced else out

    def _note_writes(self, node: Node, written: list[Tensor]) -> None:
        names, storages = set(node.state_writes), set()
        for tensor in written:
            ref = self.refs.get(id(tensor))
            storage = storage_of(tensor)
            if isinstance(ref, StateRef):
                names.add(ref.name)
                continue
            storages.add(storage)
            if storage in self.sandbox.storage_names:  # through a view
                names.add(self.sandbox.storage_names[storage])
        node.writes = frozenset(storages)
        node.state_writes = tuple(sorted(names))
        used = [ref.name for ref in state_refs((node.args, node.kwargs))]
        node.state = tuple(dict.fromkeys(itertools.chain(used, node.state, names)))


def holds_tensor(x: object, depth: int = SEARCH_DEPTH) -> bool:
    """Whether a tensor can be reached from ``x`` through attributes and containers."""
    if isinstance(x, Tensor):
        return True
    if depth == 0 or isinstance(x, CONSTANT_TYPES):
        return False
    if isinstance(x, dict):
        return any(holds_tensor(part, depth - 1) for part in x.values())
    if isinstance(x, (list, tuple, set)):
        return any(holds_tensor(part, depth - 1) for part in x)
    return any(holds_tensor(part, depth - 1) for part in getattr(x, "__dict__", {}).values())
