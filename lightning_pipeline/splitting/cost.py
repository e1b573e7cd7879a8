"""What a forward costs: work of several kinds, seconds, and which modules are worth opening."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.splitting.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    device_of,
    flop_registry,
    sdpa_flop_count,
    storage_of,
)


@dataclass(frozen=True)
class Rates:
    """Speed of a device. Only the ratios matter for where a model is cut.

    Args:
        flops: Floating-point operations per second that a large matrix product reaches.
        bytes: Bytes per second that an elementwise operation moves.
        elements: Elements per second of the operations that a CPU does one element at a time.
        launch: Seconds that any operation takes, however small.
    """

    flops: float
    bytes: float
    elements: float
    launch: float


CPU_RATES = Rates(flops=1.1e11, bytes=1.3e10, elements=1.5e8, launch=8e-6)
"""One core of a current server (AVX-512) in float32, fitted to ``benchmarks/balance.py``."""

CUDA_RATES = Rates(flops=4e14, bytes=2e12, elements=2e11, launch=5e-6)
"""A current data-centre GPU in bfloat16, by its data sheet."""

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


@dataclass(frozen=True)
class Work:
    """Amounts of what takes time.

    Attributes:
        flops: Floating-point operations of matrix products and convolutions.
        bytes: Bytes that are read and written.
        elements: Random numbers drawn, and elements that the windows of pooling go through.
        launches: Operations of ATen but for views.
        measured: Seconds that were measured, at any rates.
    """

    flops: float = 0.0
    bytes: float = 0.0
    elements: float = 0.0
    launches: float = 0.0
    measured: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.elements + other.elements,
            self.launches + other.launches,
            self.measured + other.measured,
        )

    def __sub__(self, other: Work) -> Work:
        minus = Work(-other.flops, -other.bytes, -other.elements, -other.launches, -other.measured)
        return self + minus

    def seconds(self, rates: Rates) -> float:
        """Time if nothing overlaps."""
        return (
            self.flops / rates.flops
            + self.bytes / rates.bytes
            + self.elements / rates.elements
            + self.launches * rates.launch
            + self.measured
        )


def backward_work(forward: Work, gradients: int, accumulated: float) -> Work:
    """What the backward of an operation does.

    A matrix product takes as many FLOPs again for each gradient, while other operations read and
    write once more what their forward did, for all gradients together. What was drawn is kept.

    Args:
        forward: What its forward did.
        gradients: For how many of its two operands, input and weight, a gradient is computed.
        accumulated: Bytes of the weights whose gradients are added to those of other microbatches.
    """
    if not gradients:
        return Work()
    return Work(
        gradients * forward.flops,
        forward.bytes + ACCUMULATION * accumulated,
        0.0,
        gradients * forward.launches,
    )


def weight_work(forward: Work, gradients: int, accumulated: float) -> Work:
    """The part of `backward_work` that makes gradients of weights, if there are any.

    Of two gradients that of the weight has half of the FLOPs and of what the forward moved.

    Args:
        forward: As for `backward_work`.
        gradients: As for `backward_work`.
        accumulated: As for `backward_work`; 0 if no weight has a gradient.
    """
    if not accumulated or gradients < 2:
        return backward_work(forward, gradients if accumulated else 0, accumulated)
    return Work(
        forward.flops,
        forward.bytes / 2 + ACCUMULATION * accumulated,
        0.0,
        forward.launches,
    )


class PieceWork(NamedTuple):
    """What one piece does for one microbatch.

    Attributes:
        forward: In the forward.
        backward: In the whole backward.
        weight: In the part of the backward that makes gradients of weights.
    """

    forward: Work
    backward: Work
    weight: Work

    def seconds(self, rates: Rates) -> float:
        """Time of forward and backward if nothing overlaps."""
        return (self.forward + self.backward).seconds(rates)


ACCUMULATION = 3
"""Times that a gradient is moved to add it to another: both are read, one is written."""


def rnn_flops(input: Tensor, weights: Any, *rest: Any) -> float:
    """FLOPs of one recurrent layer or stack: each weight matrix meets each element of a sequence.

    Args:
        input: [time, batch, features] in any order of the first two.
        weights: First weight or list of weights; ``rest`` may begin with further weights.
    """
    matrices = sum(t.numel() for t in _tensors((weights, *rest[:3])) if t.dim() == 2)
    return 2.0 * matrices * math.prod(input.shape[:2])


GATHERS = ("embedding", "index_select")
WINDOWS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "_adaptive_avg_pool")
RNN_OPERATIONS = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")


class CostMode(TorchDispatchMode):
    """Sums the work of every operation of ATen that runs below it.

    Attributes:
        work: What was done so far.
        random: Whether a random operation ran since this was last set to False.
        written: Storages that operations wrote to, by their schema.
        inside: Names of the submodules that run at the moment, innermost last.
        made: The submodule that last made the tensor of this id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.random = False
        self.written: set[int] = set()
        self.inside: list[str] = []
        self.made: dict[int, str] = {}
        self._writes: dict[Any, list[tuple[int, str]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if func is device_of and isinstance(args[0], FakeTensor):
            return FakeTensor.__torch_dispatch__(func, types, args)  # autograd asks all the time
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # another device or a size
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        if self.inside:
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                self.made[id(tensor)] = self.inside[-1]
        self._note_writes(func, args, kwargs)
        if not func.is_view:
            self.work += _work(func, args, kwargs, out)
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


def _work(func: Any, args: tuple[Any, ...], kwargs: dict, out: Any) -> Work:
    name = func._overloadpacket.__name__
    read = [*_tensors((args, tuple(kwargs.values())))]
    made = [*_tensors((out,))]
    if name.startswith("empty") or name == "new_empty":
        return Work()
    if name in GATHERS:  # the rows that are taken, not the table
        read = [*made, *read[1:]]
    elements = 0.0
    if torch.Tag.nondeterministic_seeded in func.tags:
        elements = sum(t.numel() for t in made)
    elif name.startswith(WINDOWS):
        window = args[1] if "adaptive" not in name and isinstance(args[1], (list, tuple)) else ()
        elements = max(made[0].numel() * math.prod(window or (1,)), read[0].numel())
    if name == "convolution":  # libraries bring its weight into an order of their own
        read += 2 * [read[1]]
    nbytes = sum(t.numel() * t.element_size() for t in (*read, *made))
    launches = read[0].shape[0] if name == "mkldnn_rnn_layer" else 1  # one for each time step
    return Work(_flops(func, args, kwargs, out), nbytes, elements, launches)


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
        work: What each called module did with all that it calls, by dotted name.
        whole: Modules that must not be opened, with the reason.
    """

    work: dict[str, Work] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, work: Work) -> None:
        """Count one call of the module ``name``."""
        self.work[name] = self.work.get(name, Work()) + work

    def seconds(self, name: str, rates: Rates) -> float:
        """Time of all calls of the module ``name``."""
        return self.work[name].seconds(rates)


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
        small = name in profile.work and profile.seconds(name, rates) <= limit
        whole = name in profile.whole or reason_to_stay_whole(child) is not None
        if name and (small or whole or not any(True for _ in child.children())):
            leaves.add(name)
            return
        for key, grandchild in child._modules.items():
            if grandchild is not None:
                visit(f"{name}.{key}" if name else key, grandchild)

    visit("", module)
    return frozenset(leaves)
