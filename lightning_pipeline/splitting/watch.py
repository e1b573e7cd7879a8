"""Attributes that forwards read while they were recorded, and whether they are what they were."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_pipeline.lightning_private import TRAINER as MODULE_TRAINER
from lightning_pipeline.splitting.settings import Freezer
from lightning_pipeline.splitting.torch_private import FLAT_WEIGHTS

Place = tuple[str, str]
"""Dotted name of a module, and the name of an attribute of it."""

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""Stands for an attribute that is not there."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STRUCTURE = ("_modules", *HOOKS)
_STATE = ("_parameters", "_buffers")
EVERY_MODULE = frozenset((*nn.Module().__dict__, *FLAT_WEIGHTS))
"""Attributes that are not the user's."""

TRAINER = "trainer."
"""Begins the names of the Trainer's attributes, which count as the LightningModule's."""

ALL = "__dict__"
"""Stands for all attributes of a module."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

replaced: dict[tuple[int, str], Any] = {}
"""What is behind the methods that the library has put on modules for a moment, by id and name."""


def is_setting(name: str) -> bool:
    """Whether an attribute may be one; weights and modes are known otherwise."""
    own = name in STRUCTURE or name not in EVERY_MODULE
    return own and (name == ALL or not name.startswith("__"))


def class_value(kind: type, name: str) -> Any:
    """What a class has under a name, not bound to anything."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


def is_property(value: Any) -> bool:
    """Whether what a class has is computed at each access and goes before the instance's."""
    return hasattr(type(value), "__set__") and hasattr(type(value), "__get__")


def is_plain(value: Any) -> bool:
    """Whether a value says all of itself, so that nothing that it was made of matters."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, _ATOMS)


def value_of(module: nn.Module, name: str) -> Any:
    """An attribute as a setting: what the user's code has set, past what the library has."""
    attributes, kind = module.__dict__, type(module)
    if name == ALL:
        found = {key: own_value(module, key) for key in attributes if is_setting(key)}
        return {key: value for key, value in found.items() if value is not ABSENT}
    if name.startswith(TRAINER):
        trainer = attributes.get(MODULE_TRAINER)
        return ABSENT if trainer is None else getattr(trainer, name[len(TRAINER) :], ABSENT)
    if is_property(class_value(kind, name)):
        try:
            return getattr(module, name)
        except Exception:
            return ABSENT
    value = own_value(module, name)
    return class_value(kind, name) if value is ABSENT else value


def own_value(module: nn.Module, name: str) -> Any:
    """What is on the module itself: an attribute, a submodule, or a mark for a weight."""
    attributes = module.__dict__
    if name in attributes:
        value = attributes[name]
        if name in HOOKS:
            return tuple(value.values())
        key = (id(module), name)
        return replaced[key] if replaced and key in replaced else value
    for entries in _STATE:
        if name in attributes.get(entries, ()):
            return "state", attributes[entries][name] is None
    return attributes.get("_modules", {}).get(name, ABSENT)


_END = object()
"""What stands behind the children of a container, so that none can pass to the next unseen."""


class Watch:
    """Looks at some attributes of a tree of modules, again and again.

    To look is cheap as long as nothing has changed: what cannot change in itself is compared by
    identity, a few hundred of them in a few operations of Python.

    Args:
        root: The outermost module.
        places: What to look at, by names in ``root``.
        others: Modules that are not in ``root``, by names that they are given.

    Attributes:
        values: What each was when it was last looked at, frozen.
    """

    def __init__(
        self,
        root: nn.Module,
        places: Iterable[Place],
        others: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self._root, self._places, self._others = root, dict.fromkeys(places), dict(others)
        self._number = 0
        self.values: dict[Place, Hashable] = {}
        self._attributes: list[tuple[nn.Module, Any, frozenset[str]]] = []
        self._children: list[tuple[nn.Module, Any]] = []
        self._lists: list[dict[str, Any]] = []
        self._empty: list[Any] = []
        self._atoms: list[Any] = []
        self._slow: list[tuple[nn.Module, str, Hashable]] = []
        self._is_stale = True

    def add(self, places: Iterable[Place], others: Mapping[str, nn.Module]) -> None:
        """Looks at more of them from now on."""
        before = len(self._places)
        self._others.update(others)
        self._places.update(dict.fromkeys(places))
        self._is_stale |= len(self._places) > before

    def look(self) -> int:
        """A number that is another one whenever something has changed since the last look."""
        if self._is_stale or not self._is_same():
            values = self._look_closely()
            self._number += values != self.values
            self.values = values
        return self._number

    def _is_same(self) -> bool:
        found: list[Any] = []
        try:
            for module, get, absent in self._attributes:
                attributes = module.__dict__
                if not attributes.keys().isdisjoint(absent):
                    return False
                found += get(attributes)
            for module, get in self._children:
                found += get(module.__dict__["_modules"])
        except KeyError:
            return False
        for entries in self._lists:
            found += entries
            found += entries.values()
            found.append(_END)
        if any(self._empty) or len(found) != len(self._atoms):
            return False
        if not all(map(is_, found, self._atoms)):
            return False
        freeze = Freezer()
        return all(freeze(value_of(module, name)) == then for module, name, then in self._slow)

    def _look_closely(self) -> dict[Place, Hashable]:
        self._attributes, self._children, self._lists = [], [], []
        self._empty, self._atoms, self._slow = [], [], []
        self._is_stale = False
        names: dict[str, list[str]] = {}
        for where, name in self._places:
            names.setdefault(where, []).append(name)
        freeze = Freezer()
        values: dict[Place, Hashable] = {}
        atoms: tuple[list[Any], list[Any], list[Any]] = [], [], []
        classes: set[tuple[type, str]] = set()
        for where, wanted in names.items():
            module = self._others.get(where) or module_at(self._root, where)
            if module is None:
                values.update(((where, name), ABSENT) for name in wanted)
                self._is_stale = True
                continue
            for name in wanted:
                values[where, name] = freeze(value_of(module, name))
            self._sort(module, wanted, atoms, {n: values[where, n] for n in wanted}, classes)
        self._atoms = [atom for group in atoms for atom in group]
        return values

    def _sort(
        self,
        module: nn.Module,
        wanted: list[str],
        atoms: tuple[list[Any], list[Any], list[Any]],
        values: dict[str, Hashable],
        classes: set[tuple[type, str]],
    ) -> None:
        """Finds the cheapest way to look at each of a module's attributes."""
        attributes, modules = module.__dict__, module.__dict__["_modules"]
        there, children, absent = [], [], []
        for name in wanted:
            of_class = class_value(type(module), name)
            if name == ALL or name.startswith(TRAINER) or is_property(of_class):
                self._slow.append((module, name, values[name]))
            elif name in HOOKS and not attributes[name]:
                there.append(name)
                self._empty.append(attributes[name])
            elif name == "_modules":
                there.append(name)
                self._lists.append(modules)
                atoms[2].extend((*modules, *modules.values(), _END))
            elif name in attributes:
                if isinstance(attributes[name], _ATOMS):
                    there.append(name)
                else:
                    self._slow.append((module, name, values[name]))
            elif name in modules:
                children.append(name)
                absent.append(name)
            elif isinstance(own_value(module, name), tuple):
                self._slow.append((module, name, values[name]))
            else:
                absent.append(name)
                if (type(module), name) not in classes:  # one of them speaks for all
                    classes.add((type(module), name))
                    self._slow.append((module, name, values[name]))
        if there or absent:
            atoms[0].extend(attributes[name] for name in there)
            self._attributes.append((module, _getter(there), frozenset(absent)))
        if children:
            atoms[1].extend(modules[name] for name in children)
            self._children.append((module, _getter(children)))


def _getter(names: list[str]) -> Any:
    """Gives a tuple of a dict's values."""
    if len(names) > 1:
        return itemgetter(*names)
    return (lambda entries: (entries[names[0]],)) if names else (lambda entries: ())


def module_at(root: nn.Module, where: str) -> nn.Module | None:
    """The submodule of a dotted name; ``None`` if there is none."""
    module: Any = root
    for key in where.split(".") if where else ():
        module = module.__dict__.get("_modules", {}).get(key)
        if module is None:
            return None
    return module


class _Described(str):
    """Stands for a value that has no short text."""

    __repr__ = str.__str__


def plain_value(value: Hashable) -> Any:
    """What a frozen value looked like, for messages."""
    if not isinstance(value, tuple) or not isinstance(value[0], type):
        return _Described(f"the {value!r} of that moment")
    kind, content = value[0], value[1]
    if kind is float:
        return float.fromhex(content)
    if kind in _ATOMS:
        return content
    return _Described(f"a {kind.__name__} with other content")
