"""Models with hooks, and with random draws in Python, around and between their modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.models.ordinary import Block
from tests.models.registry import WIDTH, Chain, register


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sigmoid()


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.gate(x)


@register()
class CollectedByHooks(nn.Module):
    """The root takes the gates' outputs by hooks that it installs for the time of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates: list[Tensor] = []
        hooks = [
            layer.gate.register_forward_hook(lambda module, args, out: gates.append(out))
            for layer in self.layers
        ]
        for layer in self.layers:
            x = layer(x)
        for hook in hooks:
            hook.remove()
        return x, torch.stack(gates).mean()


@register()
class CollectedByLastingHooks(nn.Module):
    """The first forward installs hooks that stay, as Hugging Face does for ``output_...``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedBlock() for _ in range(4))
        self._gates: list[Tensor] = []
        self.has_hooks = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_hooks:
            for layer in self.layers:
                layer.gate.register_forward_hook(self.collect)
            self.has_hooks = True
        self._gates.clear()
        for layer in self.layers:
            x = layer(x)
        gates, self._gates = self._gates, []
        return x, torch.stack([gate.mean() for gate in gates]).sum()

    def collect(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self._gates.append(out)


class LayerDrop(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), draw
        self.drop_prob = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and self.draw() < self.drop_prob else self.b(self.a(x).relu())


@register()
class LayerDrops(Chain):
    def __init__(self) -> None:
        super().__init__()
        draws = [lambda: random.random(), lambda: np.random.rand()]
        self.layers = nn.ModuleList(LayerDrop(draws[k % 2]) for k in range(6))


@register()
class HookedContainers(nn.Module):
    """Hooks on containers, which would never run if the containers were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.layers[1].register_forward_hook(lambda module, args, out: out * 2)
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
