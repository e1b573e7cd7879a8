"""What a step reads, sets, fills and changes on the LightningModule."""

from __future__ import annotations

import enum
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_pipeline.batch import leaves
from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import is_elsewhere
from lightning_pipeline.splitting.pictures import Picture
from lightning_pipeline.splitting.watch import ABSENT

Path = tuple[Any, ...]
"""Name of an attribute, and the keys and indices below it."""

_SENDABLE = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, Tensor, np.ndarray, np.generic),
    *(torch.dtype, torch.device, torch.Size),
)


@contextmanager
def class_patched(kind: type, methods: dict[str, Any]) -> Iterator[None]:
    """Sets methods of a class for the block; Python asks the class alone about attributes."""
    before = {name: kind.__dict__.get(name, ABSENT) for name in methods}
    for name, method in methods.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is ABSENT:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


@dataclass
class Uses:
    """What a step does with attributes.

    Attributes:
        read: Those that it reads before it first sets them, with their values; ``ABSENT`` for one
            that was looked for and not there.
        reads: How often it does so.
        read_again: Those that it reads after it has set them.
        written: Those that it sets, be it to what they were.
    """

    read: dict[str, Any] = field(default_factory=dict)
    reads: Counter[str] = field(default_factory=Counter)
    read_again: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


@contextmanager
def attributes_noted(module: LightningModule) -> Iterator[Uses]:
    """Notes which attributes of ``module`` are read and set."""
    kind = type(module)
    get_original, set_original = kind.__getattribute__, kind.__setattr__
    uses = Uses()
    written = uses.written

    def get(self: Any, name: str) -> Any:
        if self is not module or name.startswith("__"):
            return get_original(self, name)
        if name in written:
            uses.read_again.add(name)
            return get_original(self, name)
        try:
            value = get_original(self, name)
        except AttributeError:  # a submodule, or nothing
            uses.read.setdefault(name, ABSENT)
            raise
        uses.reads[name] += 1
        if name in self.__dict__ or not callable(value):  # or of the class
            uses.read.setdefault(name, value)
        return value

    def put(self: Any, name: str, value: Any) -> None:
        if self is module:
            written.add(name)
        set_original(self, name, value)

    with class_patched(kind, {"__getattribute__": get, "__setattr__": put}):
        yield uses


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes that the user's code has set, not those that every module has."""
    for name, value in module.__dict__.items():
        if name not in _EVERY_MODULE and not isinstance(value, nn.Module):
            yield name, value


_EVERY_MODULE = frozenset([*vars(LightningModule()), "_compiled_call_impl"])


@dataclass
class Snapshot:
    """Attributes, and the contents of the containers and tensors in them, at one moment.

    State inside other objects is not seen.

    Attributes:
        attributes: The attributes by name.
        lists: Entries of each list.
        others: Keys of each mapping, members of each set or deque, version of each tensor, by
            path; and what is in mappings and lists and is none of those.
    """

    attributes: dict[str, Any]
    lists: dict[Path, list[Any]] = field(default_factory=dict)
    others: dict[Path, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: LightningModule) -> Snapshot:
        """Looks at ``module`` now."""
        snapshot = cls(dict(_own_attributes(module)))
        seen: set[int] = set()
        for name, value in snapshot.attributes.items():
            snapshot._walk((name,), value, seen)
        return snapshot

    def _walk(self, path: Path, value: Any, seen: set[int]) -> None:
        if isinstance(value, Tensor):
            if not value.is_inference():
                self.others[path] = (value, value._version)
            return
        if isinstance(value, np.ndarray) and value.dtype != object:
            self.others[path] = (value, zlib.crc32(value.tobytes()))
            return
        if isinstance(value, SimpleNamespace):
            value = vars(value)
        if not isinstance(value, (MutableMapping, MutableSequence, MutableSet)):
            if len(path) > 1:
                self.others[path] = (value, None)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if type(value) is list:
            self.lists[path] = list(value)
        elif isinstance(value, MutableMapping):
            self.others[path] = (value, set(value))
        else:
            self.others[path] = (value, tuple(map(id, value)))
        if isinstance(value, MutableMapping):
            for key, item in value.items():
                self._walk((*path, key), item, seen)
        elif type(value) is list:
            for index, item in enumerate(value):
                if isinstance(item, (list, dict, Tensor)):
                    self._walk((*path, index), item, seen)

    def assigned(self, after: Snapshot, uses: Uses) -> tuple[str, ...]:
        """Names that were set in between."""
        return tuple(
            name
            for name, value in after.attributes.items()
            if name in uses.written or self.attributes.get(name, ABSENT) is not value
        )

    def grown(self, after: Snapshot, step: str) -> tuple[Path, ...]:
        """Lists that entries were appended to in between, new lists in mappings included.

        Raises:
            StepError: If a container or tensor was changed in any other way.
        """
        changed = {
            n for n, v in after.attributes.items() if self.attributes.get(n, ABSENT) is not v
        }
        for name in self.attributes.keys() - after.attributes.keys():
            raise _changed(step, (name,))
        found: list[Path] = []
        for path, entries in after.lists.items():
            if path[0] in changed or any(path[: len(done)] == done for done in found):
                continue
            old = self.lists.get(path, [])
            if not _begins_with(entries, old):
                raise _changed(step, path)
            if len(entries) > len(old):
                found.append(path)
        inside = {path[:n] for path in found for n in range(1, len(path) + 1)}
        for path, (value, mark) in after.others.items():
            if path[0] in changed or any(path[: len(done)] == done for done in found):
                continue
            old_value, old_mark = self.others.get(path, (ABSENT, None))
            if old_value is ABSENT and path in inside:
                continue  # a mapping that has come with a new list
            if isinstance(mark, set):  # keys: a new list may have come
                mark = {
                    key for key in mark if (*path, key) not in inside or key in (old_mark or ())
                }
            if (old_value is not value and not _is_equal(old_value, value)) or old_mark != mark:
                raise _changed(step, path)
        return tuple(found)


def is_sendable(value: Any) -> bool:
    """Whether other ranks can have it: tensors, arrays, numbers and texts in any container."""
    return all(isinstance(leaf, _SENDABLE) for leaf in leaves(value))


def refuse_objects(
    step: str, names: Iterable[str], values: dict[str, Any], uses: Uses
) -> tuple[str, ...]:
    """The names whose values can be sent.

    Raises:
        StepError: If the step goes on from one that cannot.
    """
    sendable = [name for name in names if is_sendable(values[name])]
    for name in names:
        if name not in sendable and uses.read.get(name, ABSENT) is not ABSENT:
            raise StepError(
                f"{step} reads self.{name} and then sets it to something with objects in it that "
                f"other ranks cannot have, {type(values[name]).__name__}. Keep tensors, arrays, "
                "numbers and texts in containers, or set it in a hook such as on_train_batch_end."
            )
    return tuple(sendable)


def is_same_dict(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether both have the same objects in the same order, patched methods aside."""
    return len(first) == len(second) and all(map(is_, first.values(), second.values()))


def set_attributes(module: LightningModule, values: dict[str, Any]) -> None:
    """Sets attributes past any ``__setattr__``; one that is ``ABSENT`` goes."""
    for name, value in values.items():
        if value is ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def own_attributes(module: LightningModule) -> dict[str, Any]:
    """Attributes that the user's code has set."""
    return dict(_own_attributes(module))


def lists_of(
    module: LightningModule, attributes: dict[str, Any], nested: Iterable[Path]
) -> dict[Path, list[Any]]:
    """Entries of the lists that a step may append to.

    Args:
        module: The LightningModule.
        attributes: Its attributes, of which lists are always looked at.
        nested: Lists inside other containers that the step appended to when it was surveyed; all
            that lie as deep in the same attribute are looked at.
    """
    return {path: list(entries) for path, entries in _lists(module, attributes, nested)}


def take_off(
    module: LightningModule,
    attributes: dict[str, Any],
    nested: Iterable[Path],
    before: dict[Path, list[Any]],
    step: str,
) -> dict[Path, list[Any]]:
    """Takes off what a step has appended to lists since they were as ``before``, and gives it.

    Raises:
        StepError: If one was changed in any other way.
    """
    taken = {}
    for path, entries in list(_lists(module, attributes, nested)):
        old = before.get(path)
        if old is None:
            taken[path] = list(entries)
            del _at(module, path[:-1])[path[-1]]
        elif not _begins_with(entries, old):
            raise _changed(step, path)
        elif len(entries) > len(old):
            taken[path] = entries[len(old) :]
            del entries[len(old) :]
    return taken


def _lists(
    module: LightningModule, attributes: dict[str, Any], nested: Iterable[Path]
) -> Iterator[tuple[Path, list[Any]]]:
    for name, value in attributes.items():
        is_there = module.__dict__.get(name) is value
        if is_there and isinstance(value, list):
            yield (name,), value
    for name, depth in {(path[0], len(path) - 1) for path in nested if len(path) > 1}:
        if name in attributes and module.__dict__.get(name) is attributes[name]:
            yield from _lists_below((name,), attributes[name], depth)


def _lists_below(path: Path, value: Any, depth: int) -> Iterator[tuple[Path, list[Any]]]:
    if not depth:
        if type(value) is list:
            yield path, value
    elif isinstance(value, MutableMapping):
        for key, item in value.items():
            yield from _lists_below((*path, key), item, depth - 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            yield from _lists_below((*path, index), item, depth - 1)


def append(module: LightningModule, path: Path, entries: list[Any]) -> None:
    """Appends to the list at ``path``, which is made in its mapping if it is not there."""
    found = _at(module, path)
    if found is None:
        parent = module.__dict__[path[0]]
        for key in path[1:-1]:
            parent = parent[key]  # mappings that make what is missing
        found = parent[path[-1]] = []
    found.extend(entries)


def _at(module: LightningModule, path: Path) -> Any:
    value = module.__dict__.get(path[0])
    for key in path[1:]:
        if isinstance(value, MutableMapping) and key not in value:
            return None
        if value is None or (isinstance(value, list) and key >= len(value)):
            return None
        value = value[key]
    return value


def _begins_with(entries: list[Any], old: list[Any]) -> bool:
    return len(entries) >= len(old) and all(a is b for a, b in zip(entries, old, strict=False))


def _is_equal(first: Any, second: Any) -> bool:
    plain = (bool, int, float, str)
    return type(first) is type(second) and isinstance(first, plain) and first == second


def _changed(step: str, path: Path) -> StepError:
    name = str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
    return StepError(
        f"{step} changes self.{name} in place. A step runs once a microbatch on every stage that "
        "it reaches, so the change would happen several times, and not equally on all ranks. "
        "Change it in a hook behind the step, e.g. on_train_batch_end, from what the step returns; "
        "appending to lists, and setting an attribute of the LightningModule anew, is fine."
    )


@contextmanager
def untouched(module: nn.Module, but: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Puts back buffers, attributes and what is in them, on all modules ``but``."""
    left = set(map(id, but))
    picture = Picture((n, child) for n, child in module.named_modules() if id(child) not in left)
    attributes = [(c, dict(c.__dict__)) for c in module.modules() if id(c) not in left]
    contents: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    for child, saved in attributes:
        # Hooks that a forward installs once, with a mark that it has: both are put back or neither.
        own = [key for key in saved if key in ("_parameters", "_buffers") or "_hooks" in key]
        contents += [(saved[key], dict(saved[key])) for key in own if isinstance(saved[key], dict)]
        for _, value in _own_attributes(child):
            _collect(value, contents, seen)
    there = (b for b in module.buffers() if not (is_elsewhere(b) or is_lazy(b)))
    buffers = [(buffer, buffer.detach().clone()) for buffer in there]
    try:
        yield
    finally:
        picture.restore()
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, MutableSequence) else value.update)(content)
        for child, saved in attributes:
            child.__dict__.clear()
            child.__dict__.update(saved)
        with torch.no_grad():
            for buffer, saved_buffer in buffers:
                buffer.copy_(saved_buffer)


def _collect(value: Any, contents: list[tuple[Any, Any]], seen: set[int]) -> None:
    if id(value) in seen or not isinstance(value, (dict, list, set, deque)):
        return
    seen.add(id(value))
    contents.append((value, dict(value) if isinstance(value, dict) else list(value)))
    for item in value.values() if isinstance(value, dict) else value:
        _collect(item, contents, seen)
