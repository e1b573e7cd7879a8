"""Attributes and buffers of modules as they are at one time, cheaply seen and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline.splitting.torch_private import NormBase
from lightning_pipeline.steps.attributes import ABSENT

_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_LIGHTNING = frozenset(vars(LightningModule())) - {"training"}


class Owner:
    """A dictionary of a module: its attributes, or its buffers.

    Args:
        module: The module.
        entries: The dictionary.
        name: Name of the module.
        kind: What its entries are.
    """

    def __init__(self, module: nn.Module, entries: dict[str, Any], name: str, kind: str) -> None:
        self.module, self.entries, self.kind = module, entries, kind
        self.prefix = f"{name}." if name else ""
        self.is_norm = kind == "buffer" and isinstance(module, NormBase)
        self.is_metric = isinstance(module, Metric)
        own = _OF_LIGHTNING if isinstance(module, LightningModule) else _OF_MODULE
        self.left = own if kind == "attribute" else frozenset()

    def is_patch(self, key: str) -> bool:
        """Whether an entry stands in for a method, and is of the moment."""
        method = getattr(type(self.module), key, None)
        return self.kind == "attribute" and (callable(method) or key == "_compiled_call_impl")


class Layout:
    """The names in dictionaries at one time.

    Args:
        owners: The dictionaries.
    """

    def __init__(self, owners: list[Owner]) -> None:
        self._getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self.places: list[tuple[Owner, str] | None] = []
        for owner in owners:
            keys = [key for key in owner.entries if key not in owner.left]
            keys = keys * 2 if len(keys) == 1 else keys  # a getter of one gives no tuple
            if keys:
                self._getters.append((itemgetter(*keys), owner.entries))
                self.places += [None if owner.is_patch(key) else (owner, key) for key in keys]

    def values(self) -> list[Any]:
        """What is there now, place by place."""
        return list(chain.from_iterable([get(entries) for get, entries in self._getters]))


@dataclass(eq=False)
class Values:
    """What all entries were at one time.

    Attributes:
        layout: Where they are.
        flat: The values.
        scanned: Places of those that can change in themselves.
    """

    layout: Layout
    flat: list[Any]
    scanned: list[int]

    def named(self) -> dict[tuple[int, str], tuple[Owner, Any]]:
        """The values by dictionary and name."""
        there = zip(self.layout.places, self.flat, strict=True)
        return {(id(p[0].entries), p[1]): (p[0], value) for p, value in there if p is not None}

    def unlike(self, now: Values) -> list[tuple[dict[str, Any], str, Any]]:
        """Dictionary, name and value of what is something else ``now``."""
        if self is now:
            return []
        if self.layout is now.layout:
            same = map(is_, self.flat, now.flat)
            differ = [i for i, equal in enumerate(same) if not equal]
            places = [(self.layout.places[i], self.flat[i]) for i in differ]
            return [(p[0].entries, p[1], value) for p, value in places if p is not None]
        old, new = self.named(), now.named()
        return [
            ((old.get(place) or new[place])[0].entries, place[1], old.get(place, (None, ABSENT))[1])
            for place in {**old, **new}
            if old.get(place, (None, ABSENT))[1] is not new.get(place, (None, ABSENT))[1]
        ]


@dataclass(eq=False)
class Slot:
    """A tensor that is an entry.

    Attributes:
        owner: Where it is.
        key: Its name.
        tensor: The tensor.
        version: Its version when the call began.
        value: A copy of it then; ``None`` without one.
        written: Whether the call writes to it.
    """

    owner: Owner
    key: str
    tensor: Tensor
    version: int
    value: Tensor | None
    written: bool = False


def put_entries(changes: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    """Sets entries of dictionaries."""
    for entries, key, value in changes:
        if value is ABSENT:
            entries.pop(key, None)
        else:
            entries[key] = value
