"""Running a cut model in one process, stage after stage, as ranks would."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_pipeline.splitting import (
    Program,
    StageFunction,
    canonical_names,
    partition,
    record,
    release,
)
from tests.models.registry import Arguments

SECONDS_PER_BYTE = 1e-10
Backward = Callable[[list[Tensor | None]], None]
Holders = dict[str, tuple[int, ...]]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def cut(program: Program, num_stages: int, holders: Holders | None = None) -> list[int]:
    """Bounds of the stages: 0, the cuts, the number of pieces."""
    allowed = None
    if holders is not None:
        everywhere = set(range(num_stages))
        allowed = [
            frozenset(everywhere.intersection(*(holders[name] for name in names)))
            for names in program.reads
        ]
    cuts = partition(
        program.cost,
        program.legal,
        program.bytes_at,
        num_stages,
        seconds_per_byte=SECONDS_PER_BYTE,
        allowed=allowed,
    )
    return [0, *cuts, program.num_pieces]


def place(module: nn.Module, program: Program, bounds: list[int]) -> Holders:
    """The stages that hold each parameter and buffer; unused ones follow their predecessor."""
    stages: dict[str, set[int]] = {name: set() for name in canonical_names(module).values()}
    for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
        for name in frozenset().union(*program.reads[low:high]):
            stages[name].add(stage)
    holders: Holders = {}
    before: tuple[int, ...] = (0,)
    for name, found in stages.items():
        holders[name] = before = tuple(sorted(found)) or before[:1]
    return holders


class Staged:
    """One pruned copy of a module for each stage, each with its own recording."""

    def __init__(self, module: nn.Module, arguments: Arguments, num_stages: int) -> None:
        args, kwargs = arguments
        self.num_stages = num_stages
        self.first = record(module, args, kwargs, num_stages=num_stages)
        bounds = cut(self.first, num_stages)
        self.holders = place(module, self.first, bounds)
        self.copies = [copy.deepcopy(module) for _ in range(num_stages)]
        for stage, pruned in enumerate(self.copies):
            keep = {name for name, stages in self.holders.items() if stage in stages}
            release(pruned, keep, self.holders)

    def stages(self, arguments: Arguments, reference: nn.Module) -> list[StageFunction]:
        """The stages' functions for these arguments, up to the one that ends the call."""
        args, kwargs = arguments
        settings = {"num_stages": self.num_stages, "leaves": self.first.leaves}
        program = record(reference, args, kwargs, **settings)
        bounds = cut(program, self.num_stages, self.holders)
        pruned = record(self.copies[-1], args, kwargs, **settings)
        assert pruned.piece_names == program.piece_names
        assert cut(pruned, self.num_stages, self.holders) == bounds
        functions = []
        for stage, module in enumerate(self.copies):
            own = copy.copy(program) if module is not self.copies[-1] else pruned
            own.module = module  # names are all that a program keeps of its module
            functions.append(StageFunction(own, bounds[stage], bounds[stage + 1]))
            if bounds[stage + 1] == program.num_pieces:
                break
        return functions


def run_stages(stages: list[StageFunction], arguments: Arguments) -> tuple[Any, Backward]:
    """Forward through the stages with boundaries that cut the graph, and how to go back."""
    inputs = pytree.tree_leaves(arguments)
    carried: Any = ()
    tape = []
    for stage in stages:
        received = tuple(t.detach().requires_grad_(t.requires_grad) for t in carried)
        carried = stage(received, inputs)
        tape.append((stage, received, carried))

    def backward(grads: list[Tensor | None]) -> None:
        for stage, received, given in reversed(tape):
            outputs = pytree.tree_leaves(given)
            if stage is not tape[-1][0]:
                metas = [stage.program.values[value] for value in stage.program.live[stage.hi]]
                assert [t.requires_grad for t in outputs] == [m.requires_grad for m in metas]
                assert [tuple(t.shape) for t in outputs] == [m.shape for m in metas]
                assert [t.dtype for t in outputs] == [m.dtype for m in metas]
            backpropagate(outputs, grads)
            grads = [t.grad if t.requires_grad else None for t in received]

    return carried, backward


def backpropagate(outputs: list[Any], grads: list[Tensor | None]) -> None:
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if isinstance(output, Tensor) and output.requires_grad and grad is not None
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def random_gradients(out: Any) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        if isinstance(leaf, Tensor) and leaf.requires_grad
        else None
        for leaf in pytree.tree_leaves(out)
    ]
