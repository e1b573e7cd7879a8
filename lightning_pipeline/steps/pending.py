"""The answer of a call that ends on a later stage: right shape and dtype, nothing to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting.torch_private import pytree

_NUMBERS = ("__bool__", "__float__", "__int__", "__index__", "__contains__", "item", "tolist")
READS = frozenset([*_NUMBERS, "numpy", "__array__", "equal", "allclose", "cpu", "nonzero"])
"""Functions that turn a tensor's values into something that is not a tensor on its device."""


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_AUGMENTED = frozenset(["__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)])


class TensorMeta(NamedTuple):
    """What a rank knows of a tensor that another one makes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def fill(self, value: float, device: torch.device) -> Tensor:
        """A tensor of this shape and dtype that takes no gradient yet, every element ``value``."""
        return torch.full(self.shape, value, dtype=self.dtype, device=device)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of ``tree``."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is tuple or kind is list:
        return [found for part in tree for found in tensors(part)]
    if kind is dict:
        return [found for part in tree.values() for found in tensors(part)]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def writes_in_place(name: str) -> bool:
    """Whether torch's function ``name`` writes to its first argument."""
    return name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


class Pending(Tensor):
    """Spreads through any operation as NaN; raises where a value is read or written elsewhere."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        into_other = writes_in_place(name) and not isinstance(args[0], Pending)
        if name in READS or into_other:
            raise StepError(
                f"The step uses ({name}) a value that a later pipeline stage computes, before its "
                "last call of a module on this stage. Move this line behind the last call of a "
                "module in the step, or return the value from the module as a tensor."
            )
        return super().__torch_function__(func, types, args, kwargs or {})

    @staticmethod
    def like(meta: TensorMeta, device: torch.device) -> Tensor:
        """A pending tensor of ``meta``'s shape, dtype and gradient flag."""
        value = float("nan") if meta.dtype.is_floating_point or meta.dtype.is_complex else 1
        pending = meta.fill(value, device).as_subclass(Pending)
        return pending.requires_grad_(meta.requires_grad)
