"""How the tensors of a module are made, noted while it is built without memory for its weights.

Under :meth:`Recipes.watch` a parameter becomes a meta tensor as soon as a module registers it,
provided that nothing has been written to it yet. All that is then done to meta tensors is noted
call by call (``init.normal_``, ``zero_``, ``copy_``, ...), so that each of them can be made later,
by itself, on the rank that holds it. Other tensors, buffers in particular, are computed for real.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_pipeline.splitting import is_elsewhere
from lightning_pipeline.splitting.torch_private import (
    TORCH_DIRECTORY,
    DisableTorchFunction,
    FakeTensor,
    pytree,
    storage_of,
    swap_tensors,
)
from lightning_pipeline.steps import mix, stream

_BLANK = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"])
"""Functions that give memory nobody has written to."""

_LOOKS = frozenset(["dim", "size", "stride", "numel", "nelement", "is_contiguous", "__len__"])
"""Functions that leave a blank tensor as it is."""

_HOST, _META = torch.device("cpu"), torch.device("meta")


class Ref(NamedTuple):
    """Stands for a meta tensor: where it lies in which storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Ref:
        """The place of ``tensor``."""
        size, stride = tuple(tensor.shape), tensor.stride()
        return cls(storage_of(tensor), tensor.dtype, size, stride, int(tensor.storage_offset()))


class _Generator(NamedTuple):
    """Stands for a generator of random numbers that the user made."""

    seed: int
    number: int


class _Call(NamedTuple):
    """A call that made or wrote to meta tensors.

    Attributes:
        function: What was called.
        arguments: Positional and keyword arguments, with a ``Ref`` for each meta tensor.
        results: A ``Ref`` for each leaf of the result that is a meta tensor.
        touched: Storages that it made or wrote to.
        reads: Storages of its arguments.
        dtype: The default dtype at that time.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: tuple[Ref | None, ...]
    touched: tuple[int, ...]
    reads: frozenset[int]
    dtype: torch.dtype


class Recipes:
    """What was done to the meta tensors of one process."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._of: dict[int, list[int]] = defaultdict(list)  # numbers of a storage's calls
        self._kept: dict[int, torch.UntypedStorage] = {}  # so that no number is given twice
        self._hidden: set[int] = set()  # storages that the module's code takes for real ones
        self._blank: dict[int, Tensor] = {}
        self._generators: dict[int, tuple[torch.Generator, int]] = {}  # and how often one was used

    @contextmanager
    def watch(self, *, hide: bool = True) -> Iterator[None]:
        """Notes what happens to meta tensors in the block.

        Args:
            hide: Whether blank parameters become meta tensors when they are registered. Without,
                what is known of a tensor already stays all that is known.
        """
        register = nn.Module.register_parameter
        known = {} if hide else {storage: len(calls) for storage, calls in self._of.items()}

        @functools.wraps(register)
        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            with DisableTorchFunction():  # this look at it is none of the module's
                if type(param) is nn.Parameter and storage_of(param) in self._blank:
                    self._hide(param)

        if hide:
            nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
        try:
            with _Watch(self):
                yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
            self._blank.clear()
            for storage, count in known.items():
                del self._of[storage][count:]

    def has(self, ref: Ref) -> bool:
        """Whether anything is known of how to make this tensor."""
        return ref.storage in self._of

    def make(self, ref: Ref, seed: int, names: Mapping[int, str]) -> Tensor:
        """The tensor with its value, on the host.

        Args:
            ref: Which one.
            seed: Seed of the run.
            names: Dotted names of storages. A call's random numbers depend on the seed, on the
                name of what it writes to and on how many calls wrote to that before, so they are
                the same wherever it is made.
        """
        chosen: set[int] = set()
        wanted = [ref.storage]
        seen = {ref.storage}
        while wanted:
            for number in self._of.get(wanted.pop(), ()):
                if number not in chosen:
                    chosen.add(number)
                    fresh = {*self._calls[number].reads, *self._calls[number].touched} - seen
                    seen |= fresh
                    wanted.extend(fresh)
        made = _Made(self._kept)
        with torch.inference_mode(False), torch.no_grad():
            for number in sorted(chosen):
                call = self._calls[number]
                first = next((s for s in call.touched if s in names), call.touched[0])
                label = names.get(first, f"call {number}")
                drawn = mix(seed, *label.encode(), self._of[first].index(number))
                with _default_dtype(call.dtype), stream(drawn, _HOST):
                    made.run(call, drawn)
            return made.tensor(ref)

    # what happens while a module is built

    def see(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call and notes what is worth it."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._read(function, args)
        if name == "__set__":
            return self._assign(function, args)
        if name == "__deepcopy__" and _is_meta(args[0]):
            out = function(*args, **kwargs)  # the memo holds far more than arguments
            self._note(torch.clone, (args[0],), {}, out, ())
            return out
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(map(_is_meta, tensors)):
            return self._run_real(function, name, args, kwargs, tensors)
        return self._run_meta(function, name, args, kwargs)

    def _run_real(
        self,
        function: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        out = function(*args, **kwargs)
        if name in _BLANK and isinstance(out, Tensor) and not out.is_meta:
            self._blank[storage_of(out)] = out
        elif name not in _LOOKS and self._blank:
            for tensor in tensors:
                if tensor.layout is torch.strided and not isinstance(tensor, FakeTensor):
                    self._blank.pop(storage_of(tensor), None)
        self._note(function, args, kwargs, out, ())
        return out

    def _run_meta(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call of which some arguments have no values, with the others likewise."""
        if name in ("cpu", "cuda"):
            return args[0]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        stand_ins = [_without_value(x) for x in leaves]
        tensors = [(x, x._version) for x in stand_ins if isinstance(x, Tensor)]
        meta_args, meta_kwargs = pytree.tree_unflatten(stand_ins, spec)
        if isinstance(meta_kwargs.get("device"), (str, int)):
            meta_kwargs["device"] = _META
        if name == "to" and len(meta_args) > 1 and isinstance(meta_args[1], (str, int)):
            meta_args = (meta_args[0], _META, *meta_args[2:])
        try:
            out = function(*meta_args, **meta_kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if "meta" in str(error) or "Meta" in str(error):
                raise _needs_values(name) from error
            raise
        written = [x for x, version in tensors if x._version != version]
        if any(not any(x is old for old in leaves) for x in written):
            raise _needs_values(name)
        self._note(function, args, kwargs, out, written)
        return out

    def _note(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        written: Any,
    ) -> None:
        results = [x if _is_meta(x) else None for x in pytree.tree_leaves(out)]
        if not written and all(x is None for x in results):
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        own = [x for x in leaves if _is_meta(x)]
        known = {storage_of(x) for x in own}
        made = {storage_of(x): x for x in results if x is not None}
        touched = tuple(dict.fromkeys([*map(storage_of, written), *(made.keys() - known)]))
        if not touched:
            return  # a view
        for tensor in (*own, *made.values()):
            self._kept[storage_of(tensor)] = tensor.untyped_storage()
        if known & self._hidden:
            self._hidden.update(touched)
        self._calls.append(
            _Call(
                function,
                pytree.tree_unflatten(list(map(self._stored, leaves)), spec),
                tuple(None if x is None else Ref.of(x) for x in results),
                touched,
                frozenset(known),
                torch.get_default_dtype(),
            )
        )
        for storage in touched:
            self._of[storage].append(len(self._calls) - 1)

    def _stored(self, leaf: Any) -> Any:
        """An argument as it is kept: what is real may change before it is needed."""
        if isinstance(leaf, torch.Generator):
            _, number = self._generators.get(id(leaf), (leaf, 0))
            self._generators[id(leaf)] = leaf, number + 1
            return _Generator(leaf.initial_seed(), number)
        if not isinstance(leaf, Tensor):
            return leaf
        return Ref.of(leaf) if _is_meta(leaf) else leaf.detach().to(_HOST, copy=True)

    def _read(self, function: Any, args: tuple[Any, ...]) -> Any:
        """An attribute of a tensor: where it is, is no business of a module's constructor."""
        name, tensor = function.__self__.__name__, args[0]
        if not _is_meta(tensor):
            return function(*args)
        hidden = storage_of(tensor) in self._hidden
        if name == "is_meta":
            # Some functions of torch.nn.init do nothing for a meta tensor, and ask it first.
            frame = sys._getframe(3)
            if frame.f_globals.get("__name__") != nn.init.__name__:
                return not hidden
            code = frame.f_code
            given = {key: frame.f_locals[key] for key in code.co_varnames[: code.co_argcount]}
            self._note(getattr(nn.init, code.co_name), (), given, None, [tensor])
            return True
        seeming = {"device": _HOST, "is_cpu": True} if hidden else {}
        return seeming[name] if name in seeming else function(*args)

    def _assign(self, function: Any, args: tuple[Any, ...]) -> Any:
        """An attribute set: ``parameter.data = value`` may bring a value, or take it away."""
        tensor, value = args
        data = function.__self__.__name__ == "data" and isinstance(value, Tensor)
        if not data or _is_meta(tensor) == _is_meta(value):
            return function(*args)
        made = value.detach()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        swap_tensors(tensor, made)
        return None

    def _hide(self, parameter: nn.Parameter) -> None:
        self._blank.pop(storage_of(parameter))
        size, stride = parameter.shape, parameter.stride()
        blank = torch.empty_strided(size, stride, dtype=parameter.dtype, device="meta")
        made = nn.Parameter(blank, parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        self._hidden.add(storage_of(blank))
        self._kept[storage_of(blank)] = blank.untyped_storage()
        swap_tensors(parameter, made)


class _Watch(TorchFunctionMode):
    """Tells recipes of every call."""

    def __init__(self, recipes: Recipes) -> None:
        super().__init__()
        self._recipes = recipes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recipes.see(func, args, kwargs or {})


class _Made:
    """Storages that are being made, by the numbers of the meta storages."""

    def __init__(self, like: Mapping[int, torch.UntypedStorage]) -> None:
        self._like = like
        self._real: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: Ref) -> Tensor:
        """The tensor at a place."""
        if ref.storage not in self._real:
            self._real[ref.storage] = torch.UntypedStorage(self._like[ref.storage].nbytes())
        blank = torch.empty(0, dtype=ref.dtype)
        return blank.set_(self._real[ref.storage], ref.offset, ref.size, ref.stride)

    def run(self, call: _Call, seed: int) -> None:
        """Repeats a call for real."""
        args, kwargs = pytree.tree_map(
            lambda leaf: self._argument(leaf, seed), call.arguments, is_leaf=_is_stand_in
        )
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _HOST}
        results = pytree.tree_leaves(call.function(*args, **kwargs))
        for ref, result in zip(call.results, results, strict=False):
            if ref is not None and ref.storage in call.touched and ref.storage not in self._real:
                if Ref.of(result)[1:] == ref[1:]:
                    self._real[ref.storage] = result.untyped_storage()
                else:  # the meta tensor was laid out in another way
                    self.tensor(ref).copy_(result)

    def _argument(self, leaf: Any, seed: int) -> Any:
        if isinstance(leaf, Ref):
            return self.tensor(leaf)
        if isinstance(leaf, _Generator):
            return torch.Generator().manual_seed(mix(leaf.seed, leaf.number))
        if isinstance(leaf, torch.device):
            return _HOST
        return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _is_meta(x: Any) -> bool:
    """Whether ``x`` is a tensor without values, of those that this module is about."""
    if not isinstance(x, Tensor) or is_elsewhere(x) or isinstance(x, FakeTensor) or is_lazy(x):
        return False
    return x.is_meta and x.layout is torch.strided


def _without_value(x: Any) -> Any:
    """What stands for an argument in a call that has no values to work on."""
    if isinstance(x, Tensor) and not _is_meta(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, torch.Generator):
        return None
    return _META if isinstance(x, torch.device) else x


def _is_stand_in(x: Any) -> bool:
    return isinstance(x, (Ref, _Generator))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _needs_values(operation: str) -> MisconfigurationException:
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(TORCH_DIRECTORY)]
    frame = next(f for f in reversed(frames) if f.filename != __file__)
    return MisconfigurationException(
        "A module that is built in configure_model has no weights until the first batch tells "
        f"which rank holds them, but {operation!r} asks for their values, at {frame.filename}:"
        f"{frame.lineno}: {frame.line}. Compute it from the configuration, in a buffer, or in a "
        "hook behind the first batch; or build that part in __init__, where it is made for real "
        "on every rank."
    )
