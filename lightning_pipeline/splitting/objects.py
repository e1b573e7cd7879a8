"""Dataclasses that carry tensors between modules, taken apart and put together as trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_pipeline.splitting.torch_private import pytree


def open_dataclasses(tree: Any) -> None:
    """Make every class of dataclasses with tensors in ``tree`` known to torch's pytrees, for good.

    Without that an object is one opaque leaf, and the tensors in it cannot be followed.
    """
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, Tensor)):
            parts = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            open_dataclasses(parts)
            # What is no field, such as what __post_init__ adds, could not be put together again.
            names = {field.name for field in dataclasses.fields(leaf)}
            whole = getattr(leaf, "__dict__", {}).keys() <= names
            if whole and any(isinstance(part, Tensor) for part in pytree.tree_leaves(parts)):
                pytree.register_pytree_node(type(leaf), _take_apart, _put_together)


def _take_apart(x: Any) -> tuple[list[Any], Any]:
    names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
    return [getattr(x, name) for name in names], (type(x), tuple(names))


def _put_together(parts: Iterable[Any], context: Any) -> Any:
    """The same object again, without its initialisation, which may change what it is given."""
    kind, names = context
    made = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made
