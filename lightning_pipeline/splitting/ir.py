"""The parts of a recording: values, nodes, and the references by which arguments name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pipeline.splitting.cost import Work


@dataclass(frozen=True)
class ValueRef:
    """A tensor that flows through the program."""

    id: int


@dataclass(frozen=True)
class StateRef:
    """A parameter or buffer of the recorded module, by its canonical name."""

    name: str


@dataclass(frozen=True)
class TreeRef:
    """Any registered pytree other than list, tuple and dict, flattened."""

    leaves: list[Any]
    spec: Any


@dataclass
class Value:
    """What every stage knows of a tensor without having it.

    Attributes:
        node: Index of the node that makes it; -1 for an input of the program.
        storage: A number shared by the values that share memory.
        local: Whether each stage computes it by itself, so that it is never carried.
    """

    node: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    local: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Node:
    """One recorded call: of a submodule that stays whole, or of a function.

    Attributes:
        target: Dotted name of the submodule, or the function.
        outputs: Pairs of position among the leaves of the output, and value id.
        single: Whether the output is one bare tensor.
        where: Dotted name of the module whose forward made the call.
        location: File and line number of the user's code.
        ambient: Settings (autograd, autocast, ...) that differ from the start of the recording.
        writes: Storages of values that it writes in place.
        state: Names of the parameters and buffers that it uses.
        state_writes: Names of those that it writes.
        checkpoint: Keyword arguments of the ``torch.utils.checkpoint`` that it was called through.
        generators: Identities of the user's own generators of random numbers that it may draw from.
        saved: What autograd saves in it, parameters and buffers aside, if that was counted: bytes
            of each storage, by the numbers that values have.
    """

    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    single: bool
    where: str
    location: tuple[str, int] | None
    outputs: list[tuple[int, int]] = field(default_factory=list)
    ambient: tuple[tuple[str, Any], ...] = ()
    work: Work = field(default_factory=Work)
    random: bool = False
    has_hooks: bool = False
    writes: frozenset[int] = frozenset()
    state: tuple[str, ...] = ()
    state_writes: tuple[str, ...] = ()
    checkpoint: dict[str, Any] | None = None
    generators: frozenset[int] = frozenset()
    local: bool = False
    saved: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Dotted name of the submodule, or of the module whose own code this is."""
        return self.target if isinstance(self.target, str) else self.where

    @property
    def operands(self) -> list[int]:
        """Ids of the values that it uses."""
        return [ref.id for ref in value_refs((self.args, self.kwargs))]


class AutogradFunction:
    """``function.apply`` as one node: looking through it would lose its backward."""

    def __init__(self, function: type[Any]) -> None:
        self.function = function
        self.__name__ = f"{function.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def value_refs(template: Any) -> list[ValueRef]:
    """The values that a template of arguments mentions, in order."""
    return list(_find(template, ValueRef))


def state_refs(template: Any) -> list[StateRef]:
    """The parameters and buffers that a template of arguments mentions, in order."""
    return list(_find(template, StateRef))


def _find(template: Any, kind: type) -> Iterable[Any]:
    if isinstance(template, kind):
        yield template
        return
    parts: Iterable[Any] = ()
    if isinstance(template, (list, tuple)):
        parts = template
    elif isinstance(template, dict):
        parts = template.values()
    elif isinstance(template, slice):
        parts = (template.start, template.stop, template.step)
    elif isinstance(template, TreeRef):
        parts = template.leaves
    for part in parts:
        yield from _find(part, kind)
