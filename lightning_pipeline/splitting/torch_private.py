"""The private names of torch that are needed, in one place; tested with torch 2.13."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._utils import _rebuild_meta_tensor_no_storage
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _world
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoint_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

__all__ = [
    "CHECKPOINT_CODE",
    "FLAT_WEIGHTS",
    "TORCH_DIRECTORY",
    "VALUE_DEPENDENT",
    "CheckpointFunction",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "causal_masks_unread",
    "default_store",
    "device_of",
    "disable_current_modes",
    "fake_tensor",
    "flop_registry",
    "flush_flat_weights",
    "generator_state",
    "noop_context_fn",
    "process_groups",
    "pytree",
    "rebuild_meta_tensor",
    "saved_tensor_hooks",
    "sdpa_flop_count",
    "set_generator_state",
    "single_level_function",
    "storage_of",
    "swap_tensors",
    "without_saved_tensor_hooks",
]

VALUE_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""What fake tensors raise when code asks for the values that they do not have."""

TORCH_DIRECTORY: str = torch.__path__[0]
FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""What an RNN makes of its weights again whenever they have changed."""

CHECKPOINT_CODE: types.CodeType = inspect.unwrap(checkpoint_module.checkpoint).__code__

single_level_function = _SingleLevelFunction
rebuild_meta_tensor = _rebuild_meta_tensor_no_storage
disable_current_modes = _disable_current_modes
device_of = torch.ops.prim.device.default


def process_groups() -> list[dist.ProcessGroup]:
    """All groups that this process is in, the user's among them."""
    return list(_world.pg_map)


def saved_tensor_hooks() -> object | None:
    """The innermost pair of saved-tensor hooks in force, checkpointing's among them."""
    return _top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Run a block without the innermost pair of saved-tensor hooks, if there is one."""
    hooks: Any = _top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _push_saved_tensors_default_hooks(*hooks)


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors share if, and only if, they share memory."""
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def causal_masks_unread(double: bool) -> Iterator[None]:
    """Keep nn.Transformer from comparing its masks with a causal one, to use another kernel.

    Args:
        double: Whether there are weights in double precision. On a CPU attention misreads a mask
            of another precision then, unless it is known to be causal (torch 2.13).
    """
    detect = transformer._detect_is_causal_mask

    def unread(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        if double and mask is not None and mask.dtype not in (torch.bool, torch.float64):
            return detect(mask, is_causal, size)
        return is_causal is True

    transformer._detect_is_causal_mask = unread
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


def fake_tensor(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> FakeTensor:
    """What ``torch.empty_strided`` gives under ``mode``, past the dispatcher.

    Args:
        mode: The mode that the tensor belongs to; no mode may be in force.
        like: Has its shape, strides and dtype.
        device: Where it pretends to be.
    """
    meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return FakeTensor(mode, meta, device)


def generator_state(generator: torch.Generator) -> bytes:
    """The state of a generator, whatever is being recorded at the moment."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return generator.get_state().numpy().tobytes()


def set_generator_state(generator: torch.Generator, state: bytes) -> None:
    """Puts a state back that :func:`generator_state` gave."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def flush_flat_weights(module: nn.Module) -> None:
    """Make an RNN's flat list of weights follow its ``_parameters``; nothing for other modules."""
    if isinstance(module, nn.RNNBase):
        names = module._flat_weights_names
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in names]


def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange two tensors while each Python object keeps its identity.

    ``torch.utils.swap_tensors`` refuses tensors with weak references, as the weights of an RNN
    have, and tensors that a graph uses. Both are harmless here: a weak reference points at the
    object, which stays, and a graph of the past goes on with the memory that it has seen.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)
