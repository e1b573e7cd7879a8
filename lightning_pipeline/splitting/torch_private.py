"""The private names of torch that are needed, in one place; tested with torch 2.13.

``NAMES`` has all of them, and a test looks for each. ``IN_PLACE`` are those that other files read
where they stand, because a call for each would cost: attributes of tensors, modules and graphs.
"""

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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.clip_grad import _get_total_norm
from torch.serialization import _get_layout
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoint_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

__all__ = [
    "CHECKPOINT_CODE",
    "FLAT_WEIGHTS",
    "IN_PLACE",
    "MEMORY_FORMAT",
    "NAMES",
    "STORAGE_INFO",
    "TORCH_DIRECTORY",
    "VALUE_DEPENDENT",
    "BatchNormBase",
    "CheckpointFunction",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "InstanceNormBase",
    "NormBase",
    "TorchDispatchMode",
    "backends_of",
    "causal_masks_unread",
    "default_store",
    "device_of",
    "dims_without_batch",
    "disable_current_modes",
    "divide_each",
    "fake_tensor",
    "flop_registry",
    "flush_flat_weights",
    "generator_state",
    "get_layout",
    "group_of_calls",
    "has_gradient_hooks",
    "is_compiled",
    "noop_context_fn",
    "offset_in_file",
    "process_groups",
    "pytree",
    "rebuild_meta_tensor",
    "record_offset",
    "saved_tensor_hooks",
    "sdpa_flop_count",
    "set_generator_state",
    "single_level_function",
    "storage_of",
    "swap_tensors",
    "total_norm",
    "without_saved_tensor_hooks",
]

IN_PLACE: dict[str, tuple[str, ...]] = {
    "torch.Tensor": ("_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    "torch.nn.Module": (
        *("_backward_hooks", "_backward_pre_hooks", "_buffers", "_call_impl"),
        *("_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_modules"),
        "_parameters",
    ),
    "torch.nn.LSTM": ("_flat_weights",),
    "torch.nn.Parameter": ("_is_param",),
    "torch.nn.Transformer": ("_reset_parameters",),
    "torch._dynamo.OptimizedModule": ("_orig_mod",),
    "torch._ops.OpOverload": ("_overloadpacket", "_schema"),
    "torch.autograd.graph.Node": ("_sequence_nr",),
    "AddmmBackward0": ("_saved_alpha", "_saved_beta"),
    "ConvolutionBackward0": (
        *("_saved_dilation", "_saved_groups", "_saved_output_padding", "_saved_padding"),
        *("_saved_stride", "_saved_transposed"),
    ),
    "EmbeddingBackward0": (*("_saved_padding_idx", "_saved_scale_grad_by_freq", "_saved_sparse"),),
    "torch.optim.Optimizer": ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
    "torch": ("_has_compatible_shallow_copy_type",),
}

NAMES: dict[str, tuple[str, ...]] = {
    **IN_PLACE,
    "torch": (
        *IN_PLACE["torch"],
        *("_C", "_foreach_div_", "_subclasses", "_utils"),
    ),
    "torch._C": (
        *("DisableTorchFunction", "DisableTorchFunctionSubclass", "PyTorchFileReader"),
        *("_autograd", "_swap_tensor_impl"),
    ),
    "torch._C._autograd": (
        *("_pop_saved_tensors_default_hooks", "_push_saved_tensors_default_hooks"),
        "_top_saved_tensors_default_hooks",
    ),
    "torch._subclasses.fake_tensor": (
        *("DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor"),
        *("FakeTensorMode", "UnsupportedOperatorException"),
    ),
    "torch._utils": ("_rebuild_meta_tensor_no_storage",),
    "torch.UntypedStorage": ("_cdata", "_checkpoint_offset"),
    "torch.autograd.function": ("_SingleLevelFunction",),
    "torch.distributed.ProcessGroup": ("_device_types", "_get_backend"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_world"),
    "torch.nn.LSTM": ("_flat_weight_refs", "_flat_weights", "_flat_weights_names"),
    "torch.nn.InstanceNorm1d": ("_get_no_batch_dim",),
    "torch.nn.modules.batchnorm": ("_BatchNorm", "_NormBase"),
    "torch.nn.modules.instancenorm": ("_InstanceNorm",),
    "torch.nn.modules.transformer": ("_detect_is_causal_mask",),
    "torch.nn.utils.clip_grad": ("_get_total_norm",),
    "torch.serialization": ("_get_layout",),
    "torch.utils": ("_pytree", "_python_dispatch"),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes"),
    "torch.compile": ("_torchdynamo_orig_callable",),
    "ProcessGroupNCCL": ("_group_end", "_group_start"),
}
"""Private names by their owner: an import path, or the class of a node or backend."""

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

BatchNormBase = _BatchNorm
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
InstanceNormBase = _InstanceNorm
MEMORY_FORMAT = _MEM_FORMAT_ENCODING
NormBase = _NormBase
STORAGE_INFO = _StorageInfo
default_store = _get_default_store
divide_each = torch._foreach_div_
get_layout = _get_layout
single_level_function = _SingleLevelFunction
rebuild_meta_tensor = _rebuild_meta_tensor_no_storage
disable_current_modes = _disable_current_modes
device_of = torch.ops.prim.device.default
total_norm = _get_total_norm


def process_groups() -> list[dist.ProcessGroup]:
    """All groups that this process is in, the user's among them."""
    return list(_world.pg_map)


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, one for each kind of device; those that it cannot give are left."""
    found = []
    for device in group._device_types:
        with contextlib.suppress(Exception):
            found.append(group._get_backend(device))
    return found


def group_of_calls(backend: Any) -> tuple[Any, Any]:
    """What begins and ends a group of calls of NCCL."""
    return backend._group_start, backend._group_end


def is_compiled(function: Any) -> bool:
    """Whether ``torch.compile`` made a function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def dims_without_batch(norm: nn.Module) -> int:
    """Dims of what an InstanceNorm takes for one sample without a batch's dim."""
    return norm._get_no_batch_dim()  # type: ignore[operator]


def record_offset(path: Any, record: str) -> int:
    """Where a record begins in a file of torch.save.

    Args:
        path: The file.
        record: Name of the record, without the name of the archive.
    """
    reader: Any = torch._C.PyTorchFileReader(str(path))
    return reader.get_record_offset(record)


def offset_in_file(tensor: torch.Tensor) -> int | None:
    """Where the record of a tensor begins that was loaded under a FakeTensorMode."""
    return tensor.untyped_storage()._checkpoint_offset


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


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user's hooks are called with the gradient of a parameter."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks) or bool(after)
