"""Buffers that a forward writes to, while backwards of other microbatches still need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.splitting.state import StateItem


def written_buffers(module: nn.Module, names: Iterable[str]) -> list[StateItem]:
    """The buffers below ``module`` with some of ``names`` that are held here.

    Running statistics are left out: a norm that moves them does not need them in its backward.
    """
    wanted = set(names)
    return [
        item
        for item in (state_items(module) if wanted else ())
        if item.name in wanted
        and not isinstance(item.tensor, nn.Parameter)
        and not isinstance(item.owner, nn.modules.batchnorm._NormBase)
        and not is_elsewhere(item.tensor)
    ]


@contextmanager
def of_one_microbatch(buffers: Sequence[StateItem]) -> Iterator[None]:
    """Lets the block write to copies, which autograd may keep, and takes over what they hold then.

    On one device the backward of a microbatch runs before the next one's forward writes again.
    """
    copies: dict[int, Tensor] = {}
    originals: list[tuple[StateItem, Tensor]] = []
    for item in buffers:
        original = item.entries[item.key]
        if original is not None:
            originals.append((item, original))
            item.entries[item.key] = copies.setdefault(id(original), original.clone())
    try:
        yield
    finally:
        with torch.no_grad():
            for item, original in originals:
                copy = copies[id(original)]
                if item.entries[item.key] is copy:  # else it has been bound anew
                    original.data.copy_(copy)
                    item.entries[item.key] = original
