"""Python values as they were at one moment, to be compared by value later."""

from __future__ import annotations

import dataclasses
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
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

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
        if isinstance(value, Tensor):
            counted = not (isinstance(value, nn.Parameter) or value.is_inference())
            return Same(value, value._version if counted else -1)
        if isinstance(value, nn.Module):
            return Same(value)
        if isinstance(value, enum.Enum):
            return kind, value.name or repr(value.value)
        if isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
            data = value.tobytes()
            short = data if len(data) <= _LARGE else zlib.crc32(data)
            return kind, str(value.dtype), value.shape, short
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return kind, self(value.__self__, depth), self(value.__func__, depth)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return kind, *(self(part, depth) for part in parts)
        if is_opaque(value):
            return Same(value)
        if isinstance(value, slice):
            return kind, *(self(part, depth) for part in (value.start, value.stop, value.step))
        if isinstance(value, float):
            return kind, float(value).hex()
        if isinstance(value, (str, int, *_BY_VALUE)):
            return (kind, value) if kind in _BY_VALUE else (kind, repr(value))
        return self._compound(kind, value, depth)

    def _compound(self, kind: type, value: Any, depth: int) -> Hashable:
        parts: tuple[Hashable, ...] | None = None
        if isinstance(value, (set, frozenset)):
            parts = tuple(sorted((self(part, depth) for part in value), key=repr))
        elif isinstance(value, Mapping):
            pairs = _attempt(lambda: list(value.items()))
            if pairs is not None:
                parts = tuple((self(k, depth), self(v, depth)) for k, v in pairs)
        elif isinstance(value, (list, tuple, deque)):
            parts = tuple(self(part, depth) for part in value)
        elif isinstance(value, np.ndarray):
            parts = self(value.tolist(), depth), value.shape
        attributes = attributes_of(value)
        if parts is None and not attributes and not dataclasses.is_dataclass(value):
            return Same(value)
        inside = tuple((name, self(part, depth)) for name, part in attributes.items())
        return kind, parts, inside

    def _function(self, function: types.FunctionType, depth: int) -> Hashable:
        given = function.__defaults__, function.__kwdefaults__, function.__dict__
        cells = (cell_content(cell) for cell in function.__closure__ or ())
        return (
            Same(function),
            Same(function.__code__),
            *(self(part, depth) if part else None for part in given),
            *(self(content, depth) for content in cells),
        )


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
    for base in type(value).__mro__:
        slots: Iterable[str] = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _attempt(run: Callable[[], Any]) -> Any:
    """What ``run`` gives; ``None`` if the user's class raises."""
    try:
        return run()
    except Exception:
        return None


def fingerprint(value: Hashable) -> int:
    """CRC-32 of something frozen, the same on all ranks that have equal values."""
    return zlib.crc32(repr(value).encode(errors="replace"))
