"""What a forward costs: FLOPs, bytes, seconds by roofline, and which modules are worth opening."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.splitting.torch_private import (
    TorchDispatchMode,
    flop_registry,
    sdpa_flop_count,
    storage_of,
)


@dataclass(frozen=True)
class Rates:
    """Speed of a device. Only the ratio matters for where a model is cut.

    Args:
        flops: Floating-point operations per second that a large matrix product reaches.
        bytes: Bytes per second that an elementwise operation moves.
    """

    flops: float
    bytes: float


CPU_RATES = Rates(flops=5e10, bytes=1e10)
"""One core of a current server in float32."""

CUDA_RATES = Rates(flops=4e14, bytes=2e12)
"""A current data-centre GPU in bfloat16."""

OPENING_SHARE = 0.06
"""A module is opened only if its share of the cost exceeds this number over the stages."""

WHOLE_CLASSES = (
    "OptimizedModule",
    "CheckpointWrapper",
    "ScriptModule",
    "RecursiveScriptModule",
    "TopLevelTracedModule",
    "FullyShardedDataParallel",
)
"""Classes whose inside is compiled or managed by someone else."""

RECORDING_HOOKS = ("transformers.utils.output_capturing",)
"""Modules whose forward hooks only collect outputs for the forward that is being recorded."""

Formula = Callable[..., float]


def default_rates(device: torch.device) -> Rates:
    """Rates for the type of ``device``."""
    return CPU_RATES if device.type == "cpu" else CUDA_RATES


def seconds(flops: float, nbytes: float, rates: Rates) -> float:
    """Time of an operation as the sum of computing and moving data, both at full rate."""
    return flops / rates.flops + nbytes / rates.bytes


def rnn_flops(input: Tensor, weights: Any, *rest: Any) -> float:
    """FLOPs of one recurrent layer or stack: each weight matrix meets each element of a sequence.

    Args:
        input: [time, batch, features] in any order of the first two.
        weights: First weight or list of weights; ``rest`` may begin with further weights.
    """
    matrices = sum(t.numel() for t in _tensors((weights, *rest[:3])) if t.dim() == 2)
    return 2.0 * matrices * math.prod(input.shape[:2])


RNN_OPERATIONS = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")


class CostMode(TorchDispatchMode):
    """Sums the FLOPs and bytes of every operation of ATen that runs below it.

    Attributes:
        random: Whether a random operation ran since this was last set to False.
        written: Storages that operations wrote to, by their schema.
        inside: Names of the submodules that run at the moment, innermost last.
        made: The submodule that last made the tensor of this id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0.0
        self.random = False
        self.written: set[int] = set()
        self.inside: list[str] = []
        self.made: dict[int, str] = {}
        self._writes: dict[Any, list[tuple[int, str]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        if self.inside:
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                self.made[id(tensor)] = self.inside[-1]
        self._note_writes(func, args, kwargs)
        if not func.is_view and func.namespace != "prim":  # those ask for a device or a size
            self.flops += _flops(func, args, kwargs, out)
            touched = _tensors((args, tuple(kwargs.values()), out))
            self.bytes += sum(t.numel() * t.element_size() for t in touched)
        return out

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict) -> None:
        if func not in self._writes:
            self._writes[func] = [
                (position, argument.name)
                for position, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        for position, name in self._writes[func]:
            target = args[position] if position < len(args) else kwargs.get(name)
            self.written.update(storage_of(tensor) for tensor in _tensors((target,)))


def _tensors(parts: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the arguments of an operation of ATen, which nests lists at most."""
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, (list, tuple)):
            yield from _tensors(part)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict, out: Any) -> float:
    packet = func._overloadpacket
    name = packet.__name__
    if packet in flop_registry:
        try:
            return float(flop_registry[packet](*args, **kwargs, out_val=out))
        except Exception:  # a formula that does not know this call: its bytes still count
            return 0.0
    if name in RNN_OPERATIONS:
        return rnn_flops(*args)
    if "scaled_dot_product" in name and "backward" not in name:
        query, key, value = (t.shape for t in args[:3])
        return float(sdpa_flop_count(query, key, value))
    return 0.0


@dataclass
class Profile:
    """Cost of one forward by module.

    Attributes:
        flops: FLOPs of each called module with all that it calls, by dotted name.
        bytes: The same in bytes.
        whole: Modules that must not be opened, with the reason.
    """

    flops: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, flops: float, nbytes: float) -> None:
        """Count one call of the module ``name``."""
        self.flops[name] = self.flops.get(name, 0.0) + flops
        self.bytes[name] = self.bytes.get(name, 0.0) + nbytes

    def seconds(self, name: str, rates: Rates) -> float:
        """Time of all calls of the module ``name``."""
        return seconds(self.flops[name], self.bytes[name], rates)


def reason_to_stay_whole(module: nn.Module) -> str | None:
    """Why a submodule must not be opened, whatever it costs; None if it may be."""
    if type(module).__name__ in WHOLE_CLASSES or getattr(module, "stays_whole", False):
        return f"it is a {type(module).__name__}"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled"
    # once opened a module is not called any more, so its hooks would never run
    if any(hook.__module__ not in RECORDING_HOOKS for hook in module_hooks(module)):
        return "it has hooks"
    return None


def module_hooks(module: nn.Module) -> list[Any]:
    """All hooks that run when ``module`` is called or gets gradients."""
    return [
        hook
        for registry in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
        for hook in registry.values()
    ]


def choose_leaves(
    module: nn.Module, profile: Profile, num_stages: int, rates: Rates
) -> frozenset[str]:
    """Names at which a recording stops: small modules, and those that must stay whole."""
    limit = OPENING_SHARE / num_stages * profile.seconds("", rates)
    leaves: set[str] = set()

    def visit(name: str, child: nn.Module) -> None:
        # a module that is never called itself (a ModuleList) has no cost of its own
        small = name in profile.flops and profile.seconds(name, rates) <= limit
        whole = name in profile.whole or reason_to_stay_whole(child) is not None
        if name and (small or whole or not any(True for _ in child.children())):
            leaves.add(name)
            return
        for key, grandchild in child._modules.items():
            if grandchild is not None:
                visit(f"{name}.{key}" if name else key, grandchild)

    visit("", module)
    return frozenset(leaves)
