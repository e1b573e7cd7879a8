"""What a step's own code, behind its calls of modules with weights, does and saves."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lightning_pipeline.planning.loads import Load
from lightning_pipeline.splitting import state_items
from lightning_pipeline.splitting.cost import CostMode, Work
from lightning_pipeline.splitting.torch_private import pytree, storage_of


class OwnCode(CostMode):
    """The training step, of which is noted what its own code does and saves for the backward."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self._step, self._depth, self._saved = module.training_step, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; a survey may run it again."""
        self.work, self._depth = Work(), 0
        given = {storage_of(t) for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = self._step(*args, **kwargs)
        roots = [t.grad_fn for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        found = saved_in([root for root in roots if root is not None])
        # The batch is there anyway.
        self._saved = sum(size for storage, size in found.items() if storage not in given)
        return out

    @property
    def load(self) -> Load:
        """What its own code does and keeps; a gradient goes back through it once."""
        saved = self._saved
        return Load(self.work, self.work, saved=saved, largest=saved, own=saved)

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.work
        out = super().__torch_dispatch__(func, *args, **kwargs)
        if self._depth:
            self.work = before
        return out

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what runs in the block outside of modules with weights."""

        def begin(module: nn.Module, args: Any) -> None:
            self._depth += holds(module)

        def end(module: nn.Module, args: Any, out: Any) -> None:
            self._depth -= holds(module)

        @functools.cache
        def holds(module: nn.Module) -> bool:
            return next(state_items(module), None) is not None

        hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


def saved_in(roots: Sequence[Any]) -> dict[int, int]:
    """Bytes of each storage that a graph has saved.

    Args:
        roots: Nodes of autograd where the backward begins.
    """
    found: dict[int, int] = {}
    seen, todo = set(roots), list(roots)
    while todo:
        node = todo.pop()
        names = [name for name in dir(node) if name.startswith("_saved_")]
        kept = [getattr(node, name) for name in names]
        kept += list(getattr(node, "saved_tensors", ()))
        for tensor in pytree.tree_leaves(kept):
            if isinstance(tensor, Tensor):
                found[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found
