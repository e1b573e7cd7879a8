"""Parameters and buffers of a module by name, ties included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn


class StateItem(NamedTuple):
    """One entry of a module's ``_parameters`` or ``_buffers``."""

    owner: nn.Module
    entries: dict[str, Tensor | None]
    key: str
    name: str
    tensor: Tensor


def state_items(module: nn.Module) -> Iterator[StateItem]:
    """Yield every parameter and buffer entry below ``module``; a tied tensor comes several times.

    The order is that of ``named_modules``, parameters before buffers within a module. Empty
    (``None``) entries are left out.
    """
    for prefix, owner in module.named_modules():
        for entries in (owner._parameters, owner._buffers):
            for key, tensor in entries.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    yield StateItem(owner, entries, key, name, tensor)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map each dotted name to the first name of the same tensor.

    Unlike in ``state_items`` a module that is registered at several places has all its names.
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for entries in (owner._parameters, owner._buffers)
        for key, tensor in entries.items()
        if tensor is not None
        for name in [f"{prefix}.{key}" if prefix else key]
    }
