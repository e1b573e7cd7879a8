"""Layers whose work is sleep: more stages than cores run at the speed of as many cores.

Tensors, weights, autograd graph, messages and schedule are real, and small. A layer sleeps for its
forward, for the gradient of its input, and for the gradient of its weight, the two backward parts
where a backward that is split computes each of them:

    x ── + anchor ── nap ── + ── out
                            │
             weight ── nap ─┘

A nap is the identity and takes time in the backward. Parts of a graph that depend on weights alone
wait for the weights' turn.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from lightning_pipeline.simulate import StageTime

_PR_SET_TIMERSLACK = 29


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


def _sleep(layer: int, op: str, seconds: float) -> None:
    start = time.monotonic()
    time.sleep(seconds)
    SLEEPS.append(Sleep(layer, op, start, time.monotonic()))


class _Nap(torch.autograd.Function):
    """The identity, whose backward takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int, op: str, seconds: float) -> Tensor:
        ctx.sleep = layer, op, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _sleep(*ctx.sleep)
        return grad, None, None, None


class SleepingLayer(nn.Module):
    """A layer that adds a weight to its input, and whose work is sleep.

    It reads one value of its input, so that recording it keeps it in one piece.

    Args:
        index: Its number, for the record of its sleeps.
        seconds: What it sleeps for each microbatch.
        width: Width of its weight, [width]; the weight is zero.
    """

    def __init__(self, index: int, seconds: StageTime, width: int = 16) -> None:
        super().__init__()
        self.index, self.seconds = index, seconds
        # What is before a stage's other layers: with it the first stage has an input gradient too.
        self.anchor = nn.Parameter(torch.zeros(width))
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """``x + anchor + weight`` [rows, width]."""
        x[0, 0].item()
        _sleep(self.index, "F", self.seconds.forward)
        passed = _Nap.apply(x + self.anchor, self.index, "I", self.seconds.backward_input)
        added = _Nap.apply(self.weight, self.index, "W", self.seconds.backward_weight)
        return passed + added


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
