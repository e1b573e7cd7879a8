"""Which call's outputs each tensor of a step comes from, and what the step's own code touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.batch import leaves
from lightning_pipeline.splitting import canonical_names, state_items
from lightning_pipeline.splitting.torch_private import storage_of
from lightning_pipeline.steps.checks import refuse_own_gradient
from lightning_pipeline.steps.leftovers import Leftovers
from lightning_pipeline.steps.means import ClassLoss
from lightning_pipeline.steps.pending import READS, tensors, writes_in_place


class Taint(TorchFunctionMode):
    """Follows, through the step's own code, which call's outputs a tensor comes from.

    Args:
        module: The LightningModule.
        num_calls: How many calls have been made.
        leftovers: Told of what calls make, and of what the step's own code uses.
        made_up: Whether calls are answered by made-up values.

    Attributes:
        off: Whether a call is looked at or runs.
        inside: Whether it runs.
        losses: Losses over classes, wherever they are taken.
    """

    def __init__(
        self,
        module: nn.Module,
        num_calls: Callable[[], int],
        leftovers: Leftovers,
        made_up: bool = False,
    ) -> None:
        super().__init__()
        self._leftovers, self._made_up = leftovers, made_up
        self.off = self.inside = False
        self.used: dict[str, int] = {}
        self.written: set[str] = set()
        self.losses: list[ClassLoss] = []
        self.reads_values = False
        self._num_calls = num_calls
        self._sources: dict[int, frozenset[int]] = {}
        self._kept: list[Tensor] = []
        self._read: frozenset[int] = frozenset()
        self._names: dict[int, str] = {}
        self._homes: dict[int, str] = {}
        for _, _, _, name, tensor in state_items(module):
            self._names.setdefault(id(tensor), name)
            self._homes.setdefault(storage_of(tensor), name)

    def sources(self, tree: Any) -> frozenset[int]:
        """Calls that ``tree`` may depend on, values read into Python included."""
        return self._read.union(*(self._sources.get(id(t), frozenset()) for t in tensors(tree)))

    def is_made(self, tree: Any) -> bool:
        """Whether a tensor in ``tree`` comes from a call."""
        return any(self._sources.get(id(leaf)) for leaf in leaves(tree))

    def mark(self, tree: Any, calls: frozenset[int]) -> None:
        for tensor in tensors(tree):
            self._sources[id(tensor)] = calls | self._sources.get(id(tensor), frozenset())
            self._kept.append(tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self.off and func is torch.autograd.grad:
            refuse_own_gradient(self.sources((args, kwargs)))
        if not self.off and writes_in_place(name) and name != "requires_grad_":
            self._note_write(args[0])  # before it, for made-up weights cannot be written to
        out = func(*args, **kwargs)
        if not self.off:
            self._leftovers.look((args, kwargs))
            self._note(name, args, kwargs, out)
        if self.inside:
            self._leftovers.note_made((args, kwargs), out)
        # A call that does not run is at least recorded.
        if not self.off or self.inside or self._made_up:
            loss = ClassLoss.of(name, args, kwargs, self._made_up)
            self.losses += [] if loss is None else [loss]
        return out

    def _note_write(self, written: Any) -> None:
        home = self._homes.get(storage_of(written)) if isinstance(written, Tensor) else None
        if home is not None:
            self.written.add(home)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given, calls = tensors((args, kwargs)), self.sources((args, kwargs))
        writes = writes_in_place(name) and name != "requires_grad_"
        if calls:
            self.mark(out, calls)
            if writes:
                self.mark(args[0], calls)
        if name in READS:
            self._read |= calls
            self.reads_values = True
        made = [t for t in tensors(out) if not any(t is g for g in given)]
        if made or writes or name in READS:
            for tensor in given:
                if id(tensor) in self._names:
                    self.used.setdefault(self._names[id(tensor)], self._num_calls())


def first_uses(module: nn.Module, taint: Taint) -> dict[str, int]:
    """What the step's own code uses, by canonical name, with the number of calls made before."""
    canonical = canonical_names(module)
    used: dict[str, int] = {}
    for name, before in taint.used.items():
        used[canonical[name]] = min(before, used.get(canonical[name], before))
    return used
