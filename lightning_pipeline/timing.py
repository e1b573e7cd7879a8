"""What the pieces of a step take on this device, measured: ``balance_by="time"``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

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


class PieceSeconds(NamedTuple):
    """What one piece takes for one microbatch, in seconds.

    Attributes:
        forward: Its forward.
        backward: Its whole backward.
        weight: What of that the gradients of its weights take.
    """

    forward: float
    backward: float
    weight: float


def time_pieces(survey: Survey, context: Context, mesh: Mesh, device: torch.device) -> None:
    """Puts measured seconds, forward and backward, in place of the costs of a survey's pieces.

    Each piece runs by itself on made-up values, its weights on the device for that long. Of the
    repetitions the fastest counts, of the ranks of a pipeline the median, so that all cut alike. A
    piece that made-up values do not suit keeps its cost, in the measured ones' proportion.

    Args:
        survey: What a step calls; its calls' costs are replaced.
        context: The precision plugin's context of the step.
        mesh: The rank's place, groups built.
        device: The rank's device.
    """
    modules = [module for _, module in survey.targets]
    programs = [call.program or call.alone for call in survey.calls]
    found = measure(programs, modules, context, device)
    flat = [
        value.forward + value.backward if value is not None else float("nan")
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


def measure(
    programs: Sequence[Program | None],
    modules: Sequence[nn.Module],
    context: Context,
    device: torch.device,
    splits: bool = False,
) -> list[list[PieceSeconds | None] | None]:
    """Runs every piece of some recordings by itself on made-up values.

    Args:
        programs: The recordings; they are left as they are.
        modules: The modules that they are of.
        context: The precision plugin's context of the step.
        device: Where the pieces run.
        splits: Whether the parts of a backward are measured too.

    Returns:
        For each recording the seconds of each piece, ``None`` for what does not run on made-up
        values and where there is no recording.
    """
    pictures = [Picture(module.named_modules()) for module in modules]
    known: dict[int, list[PieceSeconds | None]] = {}
    try:
        with context(), torch.enable_grad(), kept_random_state(device):
            for program in programs:
                if program is not None and id(program) not in known:
                    known[id(program)] = _Bench(program, device, splits).seconds()
    finally:
        for picture in pictures:  # made-up values must leave nothing behind
            picture.restore()
    return [known.get(id(program)) for program in programs]


def _median(own: Tensor, mesh: Mesh) -> Tensor:
    """Of each value the median over the ranks of the pipeline; NaN where one has none."""
    if mesh.sizes.pipeline == 1:
        return own
    every = [torch.empty_like(own) for _ in mesh.pipeline_ranks]
    dist.all_gather(every, own, mesh.pipeline_group)
    return torch.stack(every).median(dim=0).values


class _Bench:
    """Runs the pieces of one recording one by one."""

    def __init__(self, program: Program, device: torch.device, splits: bool) -> None:
        self._program, self._device, self._splits = program, device, splits
        positions = [position for position, _ in program.inputs]
        self._inputs: list[Any] = [None] * (1 + max(positions, default=-1))
        for position, value in program.inputs:
            self._inputs[position] = self._made_up(value)

    def seconds(self) -> list[PieceSeconds | None]:
        """What each piece takes; ``None`` where it does not run on made-up values."""
        return [self._time(piece) for piece in range(self._program.num_pieces)]

    def _made_up(self, value: int) -> Tensor:
        known = self._program.values[value]
        # One is an index of nearly everything, and no length of nothing.
        made = TensorMeta(known.shape, known.dtype, False).fill(1, self._device)
        return made.requires_grad_(known.requires_grad)

    def _time(self, piece: int) -> PieceSeconds | None:
        program = self._program
        part = StageFunction(program, piece, piece + 1)
        carried = tuple(self._made_up(value) for value in program.live[piece] if piece)
        try:
            with _weights_on(program.module, program.reads[piece], self._device):
                runs = [self._run(part, carried) for _ in range(_REPETITIONS)]
        except Exception:
            return None
        forward, backward, inputs = map(min, zip(*runs, strict=True))
        return PieceSeconds(forward, backward, max(0.0, backward - inputs))

    def _run(self, part: StageFunction, carried: tuple[Tensor, ...]) -> tuple[float, float, float]:
        """Seconds of a forward, of its backward, and of that for its inputs alone."""
        given = tuple(value.view_as(value) for value in carried)
        before = {id(value) for value in given}
        out: list[Tensor] = []

        def forward() -> None:
            leaves = pytree.tree_leaves(part(given, self._inputs))
            out[:] = [
                leaf
                for leaf in leaves
                if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in before
            ]

        there = self._clocked(forward)
        gradients = [torch.ones_like(root) for root in out]
        trained = [value for value in given if value.requires_grad]
        if not out:
            return there, 0.0, 0.0
        back = self._clocked(lambda: torch.autograd.backward(out, gradients))
        if not trained or not self._splits:
            return there, back, 0.0
        forward()
        only = self._clocked(
            lambda: torch.autograd.grad(out, trained, gradients, allow_unused=True)
        )
        return there, back, only

    def _clocked(self, run: Callable[[], Any]) -> float:
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

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
