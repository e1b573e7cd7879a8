"""Buffers that forwards write to, while backwards of other microbatches still need them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.splitting.state import StateItem
from lightning_pipeline.steps.plan import StepPlan


class MicrobatchBuffers:
    """Gives every microbatch of a pass its own copy of the buffers that the step writes to.

    On one device the backward of a microbatch runs before the forward of the next one writes
    again. Running statistics are left alone: a norm that moves them does not need them in its
    backward.

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
        for _, entries, key, _, _ in self._written[plan]:
            now = entries[key]
            if now is None:
                continue
            place = id(entries), key
            if self._copies.get(place) is not now:
                self._originals[place] = entries, key, now
            entries[key] = self._copies[place] = copies.setdefault(id(now), now.detach().clone())

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
        written = {id(item.tensor) for item in items if item.name in names}
        return [
            item
            for item in items
            if id(item.tensor) in written
            and not isinstance(item.tensor, nn.Parameter)
            and not isinstance(item.owner, nn.modules.batchnorm._NormBase)
            and not is_elsewhere(item.tensor)
        ]
