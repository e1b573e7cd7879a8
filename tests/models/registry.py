"""What the tests know of a model: how to make it, its arguments, and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WIDTH = 16
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
LAYOUTS = {
    2: (2, "GPipe"),
    3: (3, "1F1B"),
    4: (2, "InterleavedZeroBubble"),
}
"""Ranks and schedule by number of stages, for the runs over real ranks."""


@dataclass(frozen=True)
class Model:
    """How to make a model and its arguments.

    Attributes:
        make: Makes the model.
        inputs: Makes the arguments for a batch size and a length (or image size).
        sizes: Batch size and length pairs; the first is the one that it is placed with.
        dtype: Precision of the comparison.
        separable: Whether a sample's output does not depend on the batch's other samples. If it
            does (BatchNorm, contrastive losses), microbatches are what is exact, as with
            ``accumulate_grad_batches``.
        condition: What has to hold, or is so, for its users to know.
        refusal: Words of the error, for a model that a pipeline cannot train.
        only_in_steps: Whether it is the step's call that is refused, while its forward can be cut.
        loss_dtype: Precision of the loss, if it is another.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Arguments]
    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float64
    separable: bool = True
    condition: str = ""
    refusal: str = ""
    only_in_steps: bool = False
    loss_dtype: torch.dtype | None = None

    @property
    def library(self) -> str:
        """Where the model comes from."""
        module = self.make.__module__.rpartition(".")[2]
        return {"transformers_models": "transformers", "timm_models": "timm"}.get(module, "torch")

    @property
    def cuts_in_one_process(self) -> tuple[int, ...]:
        """Numbers of stages that it is cut in without ranks."""
        return (2, 3, 4) if self.library == "torch" else (3,)

    @property
    def can_be_cut(self) -> bool:
        """Whether its forward can be cut."""
        return not self.refusal or self.only_in_steps

    def build(self) -> nn.Module:
        """The model in the precision of the comparison, the same each time."""
        torch.manual_seed(0)
        made = self.make()  # Module.to would make complex weights real
        return made.double() if self.dtype is torch.float64 else made.float()

    def arguments(self, batch: int, length: int, seed: int = 5) -> Arguments:
        """Arguments of the model, floating-point ones in the precision of the comparison."""

        def cast(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(self.dtype) if floating else leaf

        torch.manual_seed(seed)
        return pytree.tree_map(cast, self.inputs(batch, length))


ZOO: dict[str, Model] = {}


def images(batch: int, size: int) -> Arguments:
    return (torch.randn(batch, 3, size, size),), {}


def vectors(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, WIDTH),), {}


def sequences(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {}


def register(
    inputs: Callable[[int, int], Arguments] = sequences,
    sizes: tuple[tuple[int, int], ...] = ((4, 8), (3, 5)),
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Callable[[Any], Any]:
    """Put a class or a function that makes a model into the zoo; see :class:`Model`."""

    def add(make: Any) -> Any:
        assert make.__name__ not in ZOO, f"there are two models {make.__name__}"
        ZOO[make.__name__] = Model(make, inputs, sizes, dtype, **more)
        return make

    return add


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Chain(nn.Module):
    """Layers one after another; the awkward models change what runs between them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x
