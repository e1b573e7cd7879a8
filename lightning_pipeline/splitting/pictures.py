"""What can be reached from the attributes of modules, as it was, to be compared and put back."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeline.splitting.settings import (
    EMPTY,
    attributes_of,
    cell_content,
    frozen,
    is_opaque,
    slots_of,
)
from lightning_pipeline.splitting.torch_private import generator_state, set_generator_state
from lightning_pipeline.splitting.watch import ABSENT, EVERY_MODULE, HOOKS, replaced

_DEPTH = 8
_LARGE = 1 << 14  # entries above which a container is left alone
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS = (dict, list, set, deque)
_SPECIAL = (nn.Module, *GENERATORS, np.ndarray)  # looked at in ways of their own
_LISTS, _TABLES = frozenset([list, set, deque]), frozenset([dict, defaultdict])
_END = object()
_OWN = ("builtins", "torch", "lightning", "torchmetrics")  # whose classes count nothing


class Picture:
    """The state of everything that can be reached from the attributes of some modules.

    Tensors, submodules, and what belongs to the Trainer are left out, and so is what lies deeper
    than eight steps or in containers of more than 16,384 entries.

    Args:
        modules: The modules, by name.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._parts: list[_Part] = []
        self._seen: set[int] = set()
        named = list(modules)
        self._modules = {id(module) for _, module in named}
        for name, module in named:
            self._add(name, "", module)
            for hooks in HOOKS:
                self._add(name, hooks, module.__dict__[hooks])
            for base in type(module).__mro__:
                if base.__module__.partition(".")[0] not in _OWN and id(base) not in self._seen:
                    self._add(name, "", base)
        for part in list(self._parts):
            for key, value in part.content[1].items():
                self._walk(part.module, key, value, _DEPTH)

    def _add(self, module: str, attribute: str, holder: Any) -> None:
        self._seen.add(id(holder))
        self._parts.append(_Part(module, attribute, holder, _content(holder)))

    def _walk(self, module: str, attribute: str, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen or id(value) in self._modules or _is_leaf(value):
            return
        self._add(module, attribute, value)
        for part in _parts_of(value):
            self._walk(module, attribute, part, depth - 1)

    def changes(self) -> list[Change]:
        """What is no longer what it was."""
        return [change for part in self._parts for change in part.changes()]

    def below(self) -> Lookout:
        """What the attributes lead to, without the modules themselves and their hooks."""
        parts = (part for part in self._parts if part.attribute not in HOOKS)
        return Lookout(part for part in parts if id(part.holder) not in self._modules)

    def holders(self) -> list[Any]:
        """The objects."""
        return [part.holder for part in self._parts]

    def restore(self) -> None:
        """Puts everything back."""
        undo(self.changes())


class Lookout:
    """Looks at some objects again and again.

    A look at what has not changed is cheap: entries and attributes are compared by identity, all
    of them in a few operations of Python.

    Args:
        parts: The objects, as they were last.
    """

    def __init__(self, parts: Iterable[_Part]) -> None:
        self._parts = [part for part in parts if not _is_fixed(part.holder)]
        self._sort()

    def changes(self) -> list[Change]:
        """What has changed since the last look that found something."""
        if self._is_same():
            return []
        changes = [change for part in self._parts for change in part.changes()]
        self._parts = [replace(part, content=_content(part.holder)) for part in self._parts]
        self._sort()
        return changes

    def _sort(self) -> None:
        """Finds the cheapest way to look at each."""
        self._lists: list[Any] = []
        self._cells: list[Any] = []
        self._tables: list[Any] = []
        self._objects: list[Any] = []
        self._slow: list[_Part] = []
        for part in self._parts:
            holder, kind = part.holder, type(part.holder)
            if kind in _LISTS:
                self._lists.append(holder)
            elif kind in _TABLES:
                self._tables.append(holder)
            elif isinstance(holder, type):
                self._tables.append(vars(holder))
            elif isinstance(holder, (*_SPECIAL, *_CONTAINERS)) or slots_of(kind):
                self._slow.append(part)
            else:
                self._objects.append(holder)
                if isinstance(holder, types.FunctionType):
                    self._cells += holder.__closure__ or ()
        self._atoms = self._found()

    def _found(self) -> list[Any]:
        found = list(map(cell_content, self._cells))
        for entries in self._lists:
            found += entries
            found.append(_END)
        for table in itertools.chain(self._tables, map(_attributes, self._objects)):
            found += table
            found += table.values()
            found.append(_END)
        return found

    def _is_same(self) -> bool:
        found = self._found()
        if len(found) != len(self._atoms) or not all(map(is_, found, self._atoms)):
            return False
        return not any(True for part in self._slow for _ in part.changes())


@dataclass(frozen=True)
class Change:
    """A change of one object.

    Attributes:
        module: Name of a module that leads there.
        attribute: Its attribute that does.
        holder: The object.
        key: The object's attribute that has changed; ``ABSENT`` for its entries.
        before: What it was.
        after: What it is now.
    """

    module: str
    attribute: str
    holder: Any
    key: Any
    before: Any
    after: Any


def undo(changes: list[Change]) -> None:
    """Makes everything what it was."""
    for change in reversed(changes):
        _put(change.holder, change.key, change.before)


def redo(changes: list[Change]) -> None:
    """Makes everything again what it had become."""
    for change in changes:
        _put(change.holder, change.key, change.after)


@dataclass(frozen=True)
class _Part:
    """One object at one moment.

    Attributes:
        module: Name of a module that leads there.
        attribute: The module's attribute that does; empty for the module and its class.
        holder: The object.
        content: Its entries, and its attributes.
    """

    module: str
    attribute: str
    holder: Any
    content: tuple[Any, dict[str, Any]]

    def changes(self) -> Iterator[Change]:
        """What has changed since."""
        (entries, before), (others, after) = self.content, _content(self.holder)
        if not _is_equal(entries, others):
            yield Change(self.module, self.attribute, self.holder, ABSENT, entries, others)
        for key in {**before, **after}:
            old, new = before.get(key, ABSENT), after.get(key, ABSENT)
            if not _is_same(old, new):
                yield Change(self.module, self.attribute or key, self.holder, key, old, new)


def _content(holder: Any) -> tuple[Any, dict[str, Any]]:
    """Entries and attributes of an object."""
    if isinstance(holder, nn.Module):
        return None, {
            key: value
            for key, value in holder.__dict__.items()
            if key not in EVERY_MODULE and (id(holder), key) not in replaced
        }
    if isinstance(holder, type):
        return None, {k: v for k, v in vars(holder).items() if _is_state(k, v)}
    if isinstance(holder, torch.Generator):
        return generator_state(holder), {}
    if isinstance(holder, np.random.Generator):
        return holder.bit_generator.state, {}
    if isinstance(holder, np.random.RandomState):
        return holder.get_state(legacy=False), {}
    if isinstance(holder, random.Random):
        return holder.getstate(), {}
    if isinstance(holder, np.ndarray):
        return holder.copy(), {}
    if isinstance(holder, types.FunctionType):
        return [cell_content(cell) for cell in holder.__closure__ or ()], dict(holder.__dict__)
    entries: Any = None
    if isinstance(holder, dict):
        entries = dict(holder)
    elif isinstance(holder, _CONTAINERS):
        entries = list(holder)
    return entries, attributes_of(holder)


def _is_fixed(holder: Any) -> bool:
    """Whether an object has nothing that could change, as a tuple."""
    changes = isinstance(holder, (type, types.FunctionType, *_SPECIAL, *_CONTAINERS))
    return not (changes or slots_of(type(holder)) or hasattr(holder, "__dict__"))


def _attributes(holder: Any) -> dict[str, Any]:
    return getattr(holder, "__dict__", None) or {}


def _put(holder: Any, key: Any, value: Any) -> None:
    """Sets an attribute, or all entries."""
    if key is not ABSENT:
        _put_attribute(holder, key, value)
    elif isinstance(holder, torch.Generator):
        set_generator_state(holder, value)
    elif isinstance(holder, np.random.Generator):
        holder.bit_generator.state = value
    elif isinstance(holder, np.random.RandomState):
        holder.set_state(value)
    elif isinstance(holder, random.Random):
        holder.setstate(value)
    elif isinstance(holder, np.ndarray):
        holder[...] = value
    elif isinstance(holder, types.FunctionType):
        for cell, content in zip(holder.__closure__ or (), value, strict=True):
            if content is not EMPTY:
                cell.cell_contents = content
    else:
        holder.clear()
        (holder.extend if isinstance(holder, (list, deque)) else holder.update)(value)


def _put_attribute(holder: Any, key: str, value: Any) -> None:
    """Sets an attribute past the user's own ``__setattr__``."""
    if isinstance(holder, type):
        delattr(holder, key) if value is ABSENT else setattr(holder, key, value)
    elif isinstance(holder, nn.Module) and value is ABSENT:
        holder.__dict__.pop(key, None)
    elif isinstance(holder, nn.Module):
        holder.__dict__[key] = value
    elif value is ABSENT:
        object.__delattr__(holder, key)
    else:
        object.__setattr__(holder, key, value)


def _is_state(name: str, value: Any) -> bool:
    """Whether what a class has may change; its methods and descriptors do not."""
    return not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__"))


def _is_same(value: Any, other: Any) -> bool:
    return value is other or frozen(value) == frozen(other)


def _is_equal(entries: Any, others: Any) -> bool:
    """Whether entries are the same; what is inside of them is looked at by itself."""
    if isinstance(entries, dict) and isinstance(others, dict):
        pairs = zip(entries.items(), others.items(), strict=False)
        same = all(_is_same(a, b) and _is_same(x, y) for (a, x), (b, y) in pairs)
        return len(entries) == len(others) and same
    if isinstance(entries, list):
        same = all(map(_is_same, entries, others))
        return len(entries) == len(others) and same
    return bool(frozen(entries) == frozen(others))


def _is_leaf(value: Any) -> bool:
    """Whether nothing in a value can change, or it is left alone."""
    if isinstance(value, GENERATORS):
        return False
    if isinstance(value, (Tensor, type(None), bool, int, float, str, bytes, torch.Size)):
        return True
    if isinstance(value, np.ndarray):
        return value.size > _LARGE
    sized = isinstance(value, (*_CONTAINERS, tuple, frozenset))
    return is_opaque(value) or (sized and len(value) > _LARGE)


def _parts_of(value: Any) -> Iterator[Any]:
    """What is inside of a value."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (*_CONTAINERS, tuple, frozenset)):
        yield from value
    if isinstance(value, types.FunctionType):
        yield from map(cell_content, value.__closure__ or ())
        yield from value.__defaults__ or ()
        yield from value.__dict__.values()
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif not isinstance(value, (*GENERATORS, np.ndarray)):
        yield from attributes_of(value).values()


def generators_below(module: nn.Module) -> list[Any]:
    """Generators of random numbers that the attributes of a module and its submodules lead to."""
    parts = Picture((name, child) for name, child in module.named_modules())
    return [holder for holder in parts.holders() if isinstance(holder, GENERATORS)]
