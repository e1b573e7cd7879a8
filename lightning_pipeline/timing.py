"""What the pieces of a step take on this device, measured: ``balance_by="time"``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting import Program, StageFunction, is_elsewhere, state_items
from lightning_pipeline.splitting.pictures import Picture
from lightning_pipeline.splitting.torch_private import flush_flat_weights, pytree
from lightning_pipeline.steps import Survey, TensorMeta, kept_random_state

_REPETITIONS = 3

Context = Callable[[], AbstractContextManager[Any]]


def time_pieces(survey: Survey, context: Context, mesh: Mesh, device: torch.device) -> None:
    """Puts measured seconds, forward and backward, in place of the costs of a survey's pieces.

    Each piece runs by itself on made-up values, its weights on the device for that long. Of the
    repetitions the fastest counts, of the ranks of a pipeline the median, so that all cut alike. A
    call that is not cut, and a piece that made-up values do not suit, keep their cost, in the
    measured ones' proportion.

    Args:
        survey: What a step calls; its calls' costs are replaced.
        context: The precision plugin's context of the step.
        mesh: The rank's place, groups built.
        device: The rank's device.
    """
    pictures = [Picture(module.named_modules()) for _, module in survey.targets]
    try:
        with context(), kept_random_state(device):
            found = [
                _Bench(call.program, device).seconds() if call.program is not None else None
                for call in survey.calls
            ]
    finally:
        for picture in pictures:  # made-up values must leave nothing behind
            picture.restore()
    flat = [
        value if value is not None else float("nan")
        for call, seconds in zip(survey.calls, found, strict=True)
        for value in (seconds or [None] * call.num_pieces)
    ]
    agreed = _median(torch.tensor(flat, dtype=torch.float64, device=device), mesh).tolist()
    costs = [cost for call in survey.calls for cost in call.cost]
    timed = [(a, c) for a, c in zip(agreed, costs, strict=True) if a == a]
    scale = sum(a for a, _ in timed) / (sum(c for _, c in timed) or 1.0) if timed else 1.0
    merged = iter([a if a == a else c * scale for a, c in zip(agreed, costs, strict=True)])
    for call in survey.calls:
        call.cost = [next(merged) for _ in range(call.num_pieces)]


def _median(own: Tensor, mesh: Mesh) -> Tensor:
    """Of each value the median over the ranks of the pipeline; NaN where one has none."""
    if mesh.sizes.pipeline == 1:
        return own
    every = [torch.empty_like(own) for _ in mesh.pipeline_ranks]
    dist.all_gather(every, own, mesh.pipeline_group)
    return torch.stack(every).median(dim=0).values


class _Bench:
    """Runs the pieces of one recording one by one."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self._device = program, device
        positions = [position for position, _ in program.inputs]
        self._inputs: list[Any] = [None] * (1 + max(positions, default=-1))
        for position, value in program.inputs:
            self._inputs[position] = self._made_up(value)

    def seconds(self) -> list[float | None]:
        """What each piece takes; ``None`` where it does not run on made-up values."""
        return [self._time(piece) for piece in range(self._program.num_pieces)]

    def _made_up(self, value: int) -> Tensor:
        known = self._program.values[value]
        # One is an index of nearly everything, and no length of nothing.
        made = TensorMeta(known.shape, known.dtype, False).fill(1, self._device)
        return made.requires_grad_(known.requires_grad)

    def _time(self, piece: int) -> float | None:
        program = self._program
        part = StageFunction(program, piece, piece + 1)
        carried = tuple(self._made_up(value) for value in program.live[piece] if piece)
        best = float("inf")
        with _weights_on(program.module, program.reads[piece], self._device):
            for _ in range(_REPETITIONS):
                given = tuple(value.view_as(value) for value in carried)
                self._wait()
                start = time.perf_counter()
                try:
                    self._step(part, given)
                except Exception:
                    return None
                self._wait()
                best = min(best, time.perf_counter() - start)
        return best

    def _step(self, part: StageFunction, given: tuple[Tensor, ...]) -> None:
        out = part(given, self._inputs)
        leaves = pytree.tree_leaves(out)
        before = {id(value) for value in given}
        roots = [
            leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in before
        ]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _weights_on(module: nn.Module, names: frozenset[str], device: torch.device) -> Iterator[None]:
    """Copies of some parameters and buffers on the device, in their place for a while."""
    items = [item for item in state_items(module) if item.name in names]
    made: dict[int, Tensor] = {}
    for item in items:
        if id(item.tensor) in made:
            continue
        if is_elsewhere(item.tensor) or item.tensor.is_meta:
            shape, dtype = tuple(item.tensor.shape), item.tensor.dtype
            value = torch.full(shape, 0.02, dtype=torch.float32, device=device).to(dtype)
        else:
            value = item.tensor.detach().to(device, copy=True)
        if isinstance(item.tensor, nn.Parameter):
            value = nn.Parameter(value, item.tensor.requires_grad)
        made[id(item.tensor)] = value
    try:
        for item in items:
            item.entries[item.key] = made[id(item.tensor)]
            flush_flat_weights(item.owner)
        yield
    finally:
        for item in items:
            item.entries[item.key] = item.tensor
        for item in items:
            flush_flat_weights(item.owner)
