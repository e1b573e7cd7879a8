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
from lightning_pipeline.steps.pending import READS, tensors, writes_in_place

_TOKEN_MEANS = ("cross_entropy", "nll_loss")


def _ignores(
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Whether one of these losses, with their arguments, leaves out targets."""
    return not target.is_floating_point() and bool((target == ignore_index).any())


class Taint(TorchFunctionMode):
    """Follows, through the step's own code, which call's outputs a tensor comes from."""

    def __init__(
        self, module: nn.Module, num_calls: Callable[[], int], look: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self._look = look
        self.off = False
        self.used: dict[str, int] = {}
        self.written: set[str] = set()
        self.ignores_targets = False
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
            self._look((args, kwargs))
            self._note(name, args, kwargs, out)
        return out

    def _note_write(self, written: Any) -> None:
        home = self._homes.get(storage_of(written)) if isinstance(written, Tensor) else None
        if home is not None:
            self.written.add(home)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.ignores_targets |= name in _TOKEN_MEANS and _ignores(*args, **kwargs)
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
