"""Parameters and buffers that live on another stage: names and metadata, and an error on use.

Plain meta tensors would be no guard: on a CPU ``F.linear(cpu, meta)`` returns garbage in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import ElsewhereError
from lightning_pipeline.splitting.state import canonical_names, state_items
from lightning_pipeline.splitting.torch_private import rebuild_meta_tensor, swap_tensors

# fmt: off
METADATA = frozenset([
    "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_floating_point", "is_inference", "is_pinned", "is_same_size", "is_shared",
    "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "share_memory_", "size",
    "storage_offset", "stride", "untyped_storage", "_has_compatible_shallow_copy_type",
])
# fmt: on
"""Functions that read or set metadata only; attributes have a rule of their own."""

GUARDED = frozenset(["detach", "clone", "empty_like", "zeros_like", "ones_like", "full_like"])
"""Functions whose result is as far away as their argument, such as an optimizer's first state."""

CONVERSIONS = frozenset(["to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"])


VIEWS = frozenset(["T", "mT", "H", "mH", "real", "imag"])
"""Attributes that are tensors, and would be a way round the guard."""


class _Elsewhere(Tensor):
    """What both kinds of placeholder have in common."""

    elsewhere_name: str
    elsewhere_holders: tuple[int, ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        first = args[0] if args else None
        if name == "equal":
            # no two tensors share a placeholder, so it equals itself only
            return args[0] is args[1]
        if isinstance(first, _Elsewhere):
            if name in ("__get__", "__set__"):
                return _attribute(first, func, args)
            if name in CONVERSIONS:
                return _converted(first, func, args[1:], kwargs)
            if name in METADATA or name in GUARDED:
                with torch._C.DisableTorchFunctionSubclass():
                    out = func(*args, **kwargs)
                return _guarded(out, first) if name in GUARDED else out
        raise _error(name, (args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _placeholder(
                self, type(self), self.elsewhere_name, self.elsewhere_holders
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # leaves the process as a plain meta tensor
        shape, stride = tuple(self.shape), self.stride()
        return rebuild_meta_tensor, (self.dtype, shape, stride, self.requires_grad)

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind, shape = type(self).__name__, tuple(self.shape)
        return f"{kind}({self.elsewhere_name!r}, {shape}, {self.dtype}, on {_stages(self)})"


class ElsewhereParameter(_Elsewhere, nn.Parameter):
    """A parameter that other stages hold."""


class ElsewhereBuffer(_Elsewhere):
    """A buffer that other stages hold, or what was detached from a placeholder."""


def is_elsewhere(tensor: object) -> TypeGuard[ElsewhereParameter | ElsewhereBuffer]:
    """Whether ``tensor`` is a placeholder."""
    return isinstance(tensor, _Elsewhere)


def release(
    module: nn.Module,
    keep: Callable[[str], bool] | Collection[str],
    holders: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Turn every parameter and buffer that is not kept into a placeholder, in place.

    The tensor objects stay the same, so optimizers, ties and other references follow.

    Args:
        module: The module; its dotted names stay as they are.
        keep: Canonical names to keep, or a function that says so.
        holders: Stages that hold each tensor, by canonical name, for messages.

    Returns:
        Canonical names of the released tensors.
    """
    kept = keep if callable(keep) else keep.__contains__
    names = canonical_names(module)
    released = []
    for item in list(state_items(module)):
        name = item.name
        if names[name] != name or kept(name) or is_elsewhere(item.tensor):
            continue
        kind = ElsewhereParameter if isinstance(item.tensor, nn.Parameter) else ElsewhereBuffer
        swap_tensors(
            item.tensor, _placeholder(item.tensor, kind, name, tuple(holders.get(name, ())))
        )
        released.append(name)
    return released


def restore(tensor: Tensor, value: Tensor) -> None:
    """Turn a placeholder back into an ordinary parameter or buffer, the same object.

    Args:
        tensor: The placeholder.
        value: Its value, of the same shape; the memory is shared, not copied.

    Raises:
        ValueError: The shapes differ.
    """
    if tuple(tensor.shape) != tuple(value.shape):
        raise ValueError(
            f"a value for {tensor!r} must have shape {tuple(tensor.shape)}, but has "
            f"{tuple(value.shape)}. Load a checkpoint of the same model"
        )
    plain = value.detach()
    if isinstance(tensor, nn.Parameter):
        plain = nn.Parameter(plain, tensor.requires_grad)
    swap_tensors(tensor, plain)


def _placeholder(like: Tensor, kind: type[Any], name: str, holders: tuple[int, ...]) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        made = meta.as_subclass(kind).requires_grad_(like.requires_grad)
    made.elsewhere_name, made.elsewhere_holders = name, holders
    return made


def _guarded(tensor: Tensor, source: _Elsewhere) -> Any:
    return _placeholder(tensor, ElsewhereBuffer, source.elsewhere_name, source.elsewhere_holders)


def _attribute(first: _Elsewhere, func: Any, args: tuple) -> Any:
    """Read any attribute that is no tensor; set the gradient, and the flag that asks for it."""
    attribute = func.__self__.__name__
    if attribute in VIEWS:
        raise _error(attribute, args)
    with torch._C.DisableTorchFunctionSubclass():
        if func.__name__ == "__set__":
            if attribute == "data" and is_elsewhere(args[1]):
                # Module.to with another dtype
                if args[1] is not first:
                    swap_tensors(first, _renamed(args[1], first))
                return None
            if attribute in ("grad", "requires_grad"):
                return func(*args)
            raise _error(attribute, args)
        out = func(*args)
    if isinstance(out, Tensor) and attribute != "grad":
        return _guarded(out, first)
    return out


def _renamed(like: Tensor, first: _Elsewhere) -> Any:
    made = _placeholder(like, type(first), first.elsewhere_name, first.elsewhere_holders)
    return made.requires_grad_(first.requires_grad)


def _converted(first: _Elsewhere, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Moving a placeholder is nothing; another dtype makes another placeholder."""
    if func.__name__ == "type" and not args and not kwargs:
        return type(first).__name__
    with torch._C.DisableTorchFunctionSubclass():
        # an empty tensor tells what dtype these arguments ask for
        dtype = func(torch.empty(0, dtype=first.dtype), *args, **kwargs).dtype
        if dtype == first.dtype:
            return first
        like = torch.empty_strided(first.shape, first.stride(), dtype=dtype, device="meta")
    return _guarded(like, first)


def _error(operation: str, arguments: Any) -> ElsewhereError:
    found = next(_placeholders(arguments))
    kind = "parameter" if isinstance(found, nn.Parameter) else "tensor"
    return ElsewhereError(
        f"{operation!r} needs the {kind} {found.elsewhere_name!r}, which is on "
        f"{_stages(found)} of the pipeline and not on this one. Use it in the step or in the "
        "forward of a module, where it is seen before the weights are placed, or after the run, "
        "when the module is whole again (unless PipelineStrategy has gather_after_run=False: then "
        "load a checkpoint, Model.load_from_checkpoint(PATH)). A hook may loop over this rank's "
        "own parameters, those with p.is_meta False; the callback EMAWeightAveraging of Lightning "
        "keeps an average of all weights"
    )


def _stages(tensor: _Elsewhere) -> str:
    holders = tensor.elsewhere_holders
    if len(holders) == 1:
        return f"stage {holders[0]}"
    return f"stages {', '.join(map(str, holders))}" if holders else "another stage"


def _placeholders(x: Any) -> Iterator[_Elsewhere]:
    if isinstance(x, _Elsewhere):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _placeholders(part)
    elif isinstance(x, Mapping):
        for part in x.values():
            yield from _placeholders(part)
