"""Buffers that forwards write to, while backwards of other microbatches still need them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.splitting.state import StateItem
from lightning_pipeline.splitting.torch_private import NormBase, pytree, storage_of
from lightning_pipeline.steps.plan import StepPlan


class MicrobatchBuffers:
    """Gives every microbatch of a pass its own copy of the buffers that the step writes to.

    On one device the backward of a microbatch runs before the forward of the next one writes
    again. Left alone are running statistics, which a norm does not need in its backward, and
    buffers that are parameters or plain attributes as well.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: WeakKeyDictionary[StepPlan, list[StateItem]] = WeakKeyDictionary()
        self._originals: dict[tuple[int, str], tuple[dict[str, Any], str, Tensor]] = {}
        self._copies: dict[tuple[int, str], Tensor] = {}

    def renew(self, plan: StepPlan) -> None:
        """Puts copies in the places of what the forward of a microbatch is about to write to."""
        if plan not in self._written:
            self._written[plan] = self._find(plan)
        copies: dict[int, Tensor] = {}
        memories: dict[int, torch.UntypedStorage] = {}
        for _, entries, key, _, _ in self._written[plan]:
            now = entries[key]
            if now is None:
                continue
            place = id(entries), key
            if self._copies.get(place) is not now:
                self._originals[place] = entries, key, now
            if id(now) not in copies:
                # Views of one memory stay views of one.
                if storage_of(now) not in memories:
                    memories[storage_of(now)] = now.untyped_storage().clone()
                how = now.storage_offset(), now.shape, now.stride()
                copies[id(now)] = now.new_empty(0).set_(memories[storage_of(now)], *how)
            entries[key] = self._copies[place] = copies[id(now)]

    def settle(self) -> None:
        """Puts the buffers back with what the last microbatch has left in them."""
        with torch.no_grad():
            for place, (entries, key, original) in self._originals.items():
                if entries[key] is self._copies[place]:  # else it has been bound anew
                    original.data.copy_(self._copies[place])
                    entries[key] = original
        self._originals, self._copies = {}, {}

    def _find(self, plan: StepPlan) -> list[StateItem]:
        names = frozenset[str]().union(*(call.writes for call in plan.calls))
        items = list(state_items(self._module)) if names else []
        here = [item for item in items if not is_elsewhere(item.tensor)]
        written = {storage_of(item.tensor) for item in here if item.name in names}
        written -= {storage_of(i.tensor) for i in here if isinstance(i.tensor, nn.Parameter)}
        written -= set(map(storage_of, self._attributes()))
        return [
            item
            for item in here
            if storage_of(item.tensor) in written and not isinstance(item.owner, NormBase)
        ]

    def _attributes(self) -> list[Tensor]:
        """Tensors by which a buffer could be reached past its entry, where no copy would be met."""
        registries = ("_parameters", "_buffers", "_modules")
        return [
            leaf
            for child in self._module.modules()
            for key, value in vars(child).items()
            if key not in registries
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor) and not is_elsewhere(leaf)
        ]
