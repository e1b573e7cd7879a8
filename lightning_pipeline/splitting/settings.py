"""Python values as they were at one moment, to be compared by value later."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import random
import re
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 12
"""How deep a value is looked into; what is below counts as changed only if it is replaced."""

MAX_PARTS = 20_000
"""Values that are looked at in one, likewise."""

_LARGE = 1 << 12  # bytes above which an array is compared by its CRC-32 alone

_PLAIN = frozenset(
    [type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, torch.layout]
)
_BY_VALUE = (
    *(*_PLAIN, range, torch.memory_format, pathlib.PurePath, re.Pattern),
    *(datetime.date, datetime.timedelta, decimal.Decimal, fractions.Fraction),
)
_BUILTIN = (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
_OPAQUE = (
    *(type, types.ModuleType, types.GeneratorType, types.CodeType, types.FrameType, *_BUILTIN),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    *(torch.Generator, np.random.Generator, np.random.RandomState, random.Random),
)
_OPAQUE_HOMES = (
    *("lightning", "pytorch_lightning", "torchmetrics"),
    *("torch.optim", "torch.utils.data", "torch.distributed"),
    *("logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "io", "_io"),
)


EMPTY = "empty"
"""Stands for what a closure's cell does not hold yet."""


class Same:
    """One object, which is no other, also where another one has got its memory.

    Args:
        value: The object.
        version: A number that changes with its content.
    """

    __slots__ = ("_find", "_hash", "_name", "version")

    def __init__(self, value: object, version: int = 0) -> None:
        try:
            self._find: Callable[[], object] = weakref.ref(value)
        except TypeError:  # kept alive instead
            self._find = lambda: value
        self._hash, self.version = id(value), version
        self._name = getattr(value, "__qualname__", type(value).__qualname__)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self.version != other.version:
            return False
        found = self._find()
        return found is not None and found is other._find()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:  # equal on all ranks, unlike the rest
        return f"<{self._name}>"


def frozen(value: Any) -> Hashable:
    """What ``value`` is now: equal to what it was then if, and only if, nothing in it has changed.

    Numbers, texts and the like are compared with their types, containers, arrays and objects by
    what is in them, functions also by their defaults and closures, tensors and modules by identity,
    tensors (parameters excepted) also by how often they have been written to.
    """
    return Freezer()(value)


class Freezer:
    """Freezes many values that share parts, each part once; for one moment."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Hashable]] = {}
        self._parts = 0

    def __call__(self, value: Any, depth: int = MAX_DEPTH) -> Hashable:
        """``value``, frozen."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, value.hex()  # NaN is itself, and -0.0 is not 0.0
        if id(value) in self._done:
            return self._done[id(value)][1]
        self._parts = 0 if depth == MAX_DEPTH else self._parts + 1
        if not depth or self._parts > MAX_PARTS:
            return Same(value)
        self._done[id(value)] = value, "around"  # for what holds itself
        made = self._made(kind, value, depth - 1)
        self._done[id(value)] = value, made
        return made

    def _made(self, kind: type, value: Any, depth: int) -> Hashable:
        if kind is dict:
            return kind, tuple((self(k, depth), self(v, depth)) for k, v in value.items())
        if kind is list or kind is tuple:
            return kind, tuple(self(part, depth) for part in value)
        if kind not in _ways:
            _ways[kind] = _way_of(kind)
        return _ways[kind](self, value, depth)

    def same(self, value: Any, depth: int) -> Hashable:
        """By identity."""
        return Same(value)

    def tensor(self, value: Tensor, depth: int) -> Hashable:
        """By identity and version."""
        counted = not (isinstance(value, nn.Parameter) or value.is_inference())
        return Same(value, value._version if counted else -1)

    def by_value(self, value: Any, depth: int) -> Hashable:
        """By equality."""
        return type(value), value

    def by_text(self, value: Any, depth: int) -> Hashable:
        """Of a class that someone has derived from a plain one."""
        inside = float.hex(value) if isinstance(value, float) else repr(value)
        return type(value), inside, self(attributes_of(value), depth)

    def member(self, value: enum.Enum, depth: int) -> Hashable:
        """One of an enumeration."""
        return type(value), value.name or repr(value.value)

    def array(self, value: np.ndarray, depth: int) -> Hashable:
        """By what is in an array, or a number, of NumPy."""
        if value.dtype.hasobject:
            return type(value), value.shape, self(value.tolist(), depth)
        data = value.tobytes()
        short = data if len(data) <= _LARGE else zlib.crc32(data)
        return type(value), str(value.dtype), value.shape, short

    def slice(self, value: slice, depth: int) -> Hashable:
        """By its bounds."""
        return slice, *(self(part, depth) for part in (value.start, value.stop, value.step))

    def function(self, value: types.FunctionType, depth: int) -> Hashable:
        """By identity, defaults and closure."""
        own = Same(value), Same(value.__code__)
        given = value.__defaults__, value.__kwdefaults__, value.__dict__
        if not (value.__closure__ or any(given)):
            return own
        cells = (cell_content(cell) for cell in value.__closure__ or ())
        parts = (self(part, depth) if part else None for part in given)
        return *own, *parts, *(self(content, depth) for content in cells)

    def method(self, value: types.MethodType, depth: int) -> Hashable:
        """By its function and what that is bound to."""
        return types.MethodType, self(value.__self__, depth), self(value.__func__, depth)

    def partial(self, value: functools.partial[Any], depth: int) -> Hashable:
        """By its function and arguments."""
        parts = (value.func, value.args, value.keywords)
        return functools.partial, *(self(part, depth) for part in parts)

    def set(self, value: Any, depth: int) -> Hashable:
        """By its members, in an order that is the same on all ranks."""
        parts = sorted((self(part, depth) for part in value), key=repr)
        return type(value), tuple(parts), self._attributes(value, depth)

    def mapping(self, value: Mapping[Any, Any], depth: int) -> Hashable:
        """By its entries, in order."""
        try:
            pairs = list(value.items())
        except Exception:  # the user's class
            return self.object(value, depth)
        parts = tuple((self(k, depth), self(v, depth)) for k, v in pairs)
        return type(value), parts, self._attributes(value, depth)

    def sequence(self, value: Any, depth: int) -> Hashable:
        """By its entries."""
        parts = tuple(self(part, depth) for part in value)
        return type(value), parts, self._attributes(value, depth)

    def object(self, value: Any, depth: int) -> Hashable:
        """By its attributes, if it can have any."""
        inside = self._attributes(value, depth)
        return (type(value), inside) if inside or hasattr(value, "__dict__") else Same(value)

    def _attributes(self, value: Any, depth: int) -> Hashable:
        return tuple((name, self(part, depth)) for name, part in attributes_of(value).items())


_Way: TypeAlias = Callable[[Freezer, Any, int], Hashable]
_ways: weakref.WeakKeyDictionary[type, _Way] = weakref.WeakKeyDictionary()


def _way_of(kind: type) -> _Way:
    """How values of a class are frozen."""
    table: list[tuple[Any, _Way]] = [
        (Tensor, Freezer.tensor),
        (nn.Module, Freezer.same),
        (enum.Enum, Freezer.member),
        ((np.generic, np.ndarray), Freezer.array),
        (types.FunctionType, Freezer.function),
        (types.MethodType, Freezer.method),
        (functools.partial, Freezer.partial),
        (slice, Freezer.slice),
        ((set, frozenset), Freezer.set),
        (Mapping, Freezer.mapping),
        ((list, tuple, deque), Freezer.sequence),
    ]
    if kind in _BY_VALUE:
        return Freezer.by_value
    if issubclass(kind, _OPAQUE) or _is_foreign(kind):
        return Freezer.same
    for kinds, way in table:
        if issubclass(kind, kinds):
            return way
    if issubclass(kind, (datetime.date, datetime.timedelta, pathlib.PurePath)):
        return Freezer.by_value
    return Freezer.by_text if issubclass(kind, (str, int, float, bytes)) else Freezer.object


def cell_content(cell: Any) -> Any:
    """What a closure's cell holds; a mark if it holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def is_opaque(value: Any) -> bool:
    """Whether an object is not looked into: it is no setting, or not the user's."""
    return isinstance(value, _OPAQUE) or _is_foreign(type(value))


def _is_foreign(kind: type) -> bool:
    """Whether objects of a class, the Trainer say, are nobody's settings."""
    if kind not in _foreign:
        homes = [base.__module__ for base in kind.__mro__]
        _foreign[kind] = not issubclass(kind, (Mapping, list, tuple, set, nn.Module)) and any(
            home == name or home.startswith(f"{name}.") for home in homes for name in _OPAQUE_HOMES
        )
    return _foreign[kind]


_foreign: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object itself, those in slots included."""
    found = dict(getattr(value, "__dict__", None) or {})
    names = slots_of(type(value))
    found.update((name, getattr(value, name)) for name in names if hasattr(value, name))
    return found


def slots_of(kind: type) -> tuple[str, ...]:
    """Names of the attributes that objects of a class have in slots."""
    if kind not in _slots:
        lists = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
        names = [n for slots in lists for n in ((slots,) if isinstance(slots, str) else slots)]
        _slots[kind] = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
    return _slots[kind]


_slots: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
