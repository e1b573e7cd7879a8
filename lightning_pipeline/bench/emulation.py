"""Layers whose work is sleep: more stages than cores run at the speed of as many cores.

Tensors, weights, autograd graph, messages and schedule are real, and small. A layer sleeps for its
forward, for the gradient of its input, and for the gradient of its weight, the two backward parts
where a backward that is split computes each of them:

    x ── + anchor ── * 1 ───────────┐
    │          input gradient: sleeps when the node of "* 1" runs
    └─ detach ── @ weight.T ─────── + ── out
               weight gradient: sleeps in the product with what the layer saved of x
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_pipeline.simulate import StageTime

_PR_SET_TIMERSLACK = 29
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.addmm_.default, _aten.addmm.out}
_ALIASES = {_aten.detach.default, _aten.t.default, _aten.alias.default, _aten.transpose.int}


class Sleep(NamedTuple):
    """One sleep of a layer.

    Attributes:
        layer: Index of the layer.
        op: ``F``, ``I`` or ``W``.
        start: When it began, on the monotonic clock of the machine.
        end: When it ended.
    """

    layer: int
    op: str
    start: float
    end: float


SLEEPS: list[Sleep] = []
"""All sleeps of this process, in order. Not on the layers: a step must not change its modules."""


def sleep_precisely() -> None:
    """Takes the 50 us off that Linux may add to each sleep of this thread and those it starts."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@dataclass
class _Cost:
    """What the weight gradient of one microbatch takes; in the forward it takes nothing."""

    layer: int
    seconds: float
    in_forward: bool = True

    def pay(self) -> None:
        if not self.in_forward:
            _sleep(self.layer, "W", self.seconds)


def _sleep(layer: int, op: str, seconds: float) -> None:
    start = time.monotonic()
    time.sleep(seconds)
    SLEEPS.append(Sleep(layer, op, start, time.monotonic()))


class _Saved(Tensor):
    """A layer's input as its weight gradient sees it: a product with it takes time."""

    value: Tensor
    cost: _Cost

    @staticmethod
    def wrap(value: Tensor, cost: _Cost) -> _Saved:
        """``value`` [rows, width], whose products cost ``cost``."""
        saved: _Saved = Tensor._make_wrapper_subclass(
            _Saved, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        saved.value, saved.cost = value, cost
        return saved

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs ``func`` on plain tensors, after the sleep if it is the weight gradient."""
        cost = next(a.cost for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, _Saved))
        if func in _PRODUCTS:
            cost.pay()
        args, kwargs = pytree.tree_map_only(_Saved, lambda a: a.value, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return _Saved.wrap(out, cost) if func in _ALIASES else out


class SleepingLayer(nn.Module):
    """A linear layer with a residual, whose work is sleep.

    It reads one value of its input, so that recording it keeps it in one piece.

    Args:
        index: Its number, for the record of its sleeps.
        seconds: What it sleeps for each microbatch.
        width: Width of its weight, [width, width]; the weight is zero.
    """

    def __init__(self, index: int, seconds: StageTime, width: int = 16) -> None:
        super().__init__()
        self.index, self.seconds = index, seconds
        # What is before a stage's other layers: with it the first stage has an input gradient too.
        self.anchor = nn.Parameter(torch.zeros(width))
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x + anchor + x @ weight.T`` [rows, width], whose last product has no gradient of x."""
        x[0, 0].item()
        _sleep(self.index, "F", self.seconds.forward)
        passed = (x + self.anchor) * 1.0
        if passed.grad_fn is not None:
            passed.grad_fn.register_prehook(self._on_input_gradient)
        cost = _Cost(self.index, self.seconds.backward_weight)
        product = torch.mm(_Saved.wrap(x.detach(), cost), self.weight.t())
        cost.in_forward = False
        return passed + product

    def _on_input_gradient(self, gradients: Any) -> None:
        _sleep(self.index, "I", self.seconds.backward_input)


class SleepingModel(L.LightningModule):
    """Sleeping layers one after another, ``net.0``, ``net.1``, ...

    Args:
        num_layers: Number of layers.
        seconds: What each sleeps for a microbatch.
        width: Width of each.
    """

    def __init__(self, num_layers: int, seconds: StageTime, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(*(SleepingLayer(i, seconds, width) for i in range(num_layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square of the last layer's output, ``batch`` of shape [rows, width]."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD that changes nothing, so that all steps are alike."""
        return torch.optim.SGD(self.parameters(), lr=0.0)
