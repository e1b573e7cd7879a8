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
from lightning_pipeline.splitting.torch_private import (
    DisableTorchFunctionSubclass,
    rebuild_meta_tensor,
    swap_tensors,
)

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


UNPLACED = (-1,)
"""Holders of a tensor that no rank holds before the first batch."""

UPDATES = frozenset([
    "add", "sub", "mul", "div", "true_divide", "multiply", "subtract", "lerp", "addcmul", "addcdiv",
    "neg", "abs", "pow", "sqrt", "clamp", "copy", "zero", "fill", "__rsub__",
])  # fmt: skip
"""Functions of an update of weights by each other, by their names without the underscore.

They draw no random numbers and read no values, so that the ranks that hold all of the weights do
them and the others need not.
"""

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
                with DisableTorchFunctionSubclass():
                    out = func(*args, **kwargs)
                return _guarded(out, first) if name in GUARDED else out
        if name.startswith("_foreach_") and name.endswith("_"):
            return _update_each(func, args, kwargs)
        plain = name if name.endswith("__") else name.removesuffix("_")
        if plain in UPDATES and "out" not in kwargs:
            return _update(func, name, args, kwargs)
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
    with DisableTorchFunctionSubclass(), torch.no_grad():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        made = meta.as_subclass(kind).requires_grad_(like.requires_grad)
    made.elsewhere_name, made.elsewhere_holders = name, holders
    return made


def _guarded(tensor: Tensor, source: _Elsewhere) -> Any:
    return _placeholder(tensor, ElsewhereBuffer, source.elsewhere_name, source.elsewhere_holders)


def _update(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What the ranks that hold these weights compute: nothing to do, and nothing to have, here.

    Raises:
        ElsewhereError: If the weights are not on the same stages, or a gradient is asked for.
    """
    found = list(_placeholders((args, kwargs)))
    first, holders = found[0], found[0].elsewhere_holders
    unlike = [other for other in found if other.elsewhere_holders != holders]
    takes_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in found)
    if takes_gradient or not holders or holders == UNPLACED:
        raise _error(name, (args, kwargs))
    if unlike:
        other = f"{unlike[0].elsewhere_name!r}, on {_stages(unlike[0])}"
        raise _apart(name, first, other)
    writes = name.endswith("_") and not name.endswith("__")
    if writes and first is not args[0]:
        raise _apart(name, first, "one that is on this rank")

    def plain(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_elsewhere(x):
            return x
        if x.ndim:  # the ranks that hold the others may not have it
            raise _apart(name, first, "one that is on this rank")
        return torch.empty((), dtype=x.dtype, device="meta")

    with DisableTorchFunctionSubclass():
        out = func(*map(plain, args), **{key: plain(x) for key, x in kwargs.items()})
    return first if writes else _guarded(out, first)


def _apart(operation: str, first: _Elsewhere, other: str) -> ElsewhereError:
    return ElsewhereError(
        f"{operation!r} brings together {first.elsewhere_name!r}, which is on {_stages(first)} of "
        f"the pipeline and not on this one, and {other}. An averaged copy of a module goes with "
        "its original if both have the same structure and lie at most two names deep in the "
        "LightningModule, such as self.student and copy.deepcopy(self.student). Use anything else "
        "in the step or in the forward of a module, where it is seen before the weights are "
        "placed; the callback EMAWeightAveraging of Lightning keeps an average of all weights"
    )


def _update_each(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Updates the tensors of a list that are here, each by what stands in its place."""
    lists = [x for x in args if isinstance(x, (list, tuple))]
    if not lists or any(isinstance(x, (list, tuple)) for x in kwargs.values()):
        raise _error(func.__name__, (args, kwargs))
    rows = list(zip(*lists, strict=True))
    far = [any(map(is_elsewhere, row)) for row in rows]
    name = func.__name__.removeprefix("_foreach_")
    single = getattr(Tensor, name, None)
    for row, is_far in zip(rows, far, strict=True):
        if is_far:
            if name.removesuffix("_") not in UPDATES or single is None:
                raise _error(func.__name__, row)
            others = (x for x in args if not isinstance(x, (list, tuple)))
            _update(single, name, (*row, *others), kwargs)
    here = [
        [x for x, is_far in zip(value, far, strict=True) if not is_far]
        if isinstance(value, (list, tuple))
        else value
        for value in args
    ]
    if here[0]:
        func(*here, **kwargs)
    return None


def _attribute(first: _Elsewhere, func: Any, args: tuple) -> Any:
    """Read any attribute that is no tensor; set the gradient, and the flag that asks for it."""
    attribute = func.__self__.__name__
    if attribute in VIEWS:
        raise _error(attribute, args)
    with DisableTorchFunctionSubclass():
        if func.__name__ == "__set__":
            if attribute == "data" and is_elsewhere(args[1]):
                # Module.to with another dtype, or an update
                if args[1].elsewhere_holders != first.elsewhere_holders:
                    raise _error(attribute, args)
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
    with DisableTorchFunctionSubclass():
        # an empty tensor tells what dtype these arguments ask for
        dtype = func(torch.empty(0, dtype=first.dtype), *args, **kwargs).dtype
        if dtype == first.dtype:
            return first
        like = torch.empty_strided(first.shape, first.stride(), dtype=dtype, device="meta")
    return _guarded(like, first)


def _error(operation: str, arguments: Any) -> ElsewhereError:
    found = next(_placeholders(arguments))
    kind = "parameter" if isinstance(found, nn.Parameter) else "tensor"
    if found.elsewhere_holders == UNPLACED:
        return ElsewhereError(
            f"{operation!r} needs the {kind} {found.elsewhere_name!r}, which gets its value with "
            "the first batch: its module was built without weights, in configure_model or on "
            "meta. Use it in the step, or in a hook behind the first one, e.g. "
            "on_train_batch_end; for weights that are there before, build the module in __init__"
        )
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
    if holders == UNPLACED:
        return "no stage yet"
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
