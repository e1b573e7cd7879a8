"""One plain Lightning checkpoint out of the parts that the ranks of a pipeline hold, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting import is_elsewhere, state_items

_Path = tuple[Any, ...]
_OPTIMIZERS = "optimizer_states"


def gather(checkpoint: dict[str, Any], mesh: Mesh) -> dict[str, Any] | None:
    """Fills the checkpoint of global rank 0 with what the other ranks of its pipeline hold.

    One rank after the other sends its part, so that no rank ever holds more than the whole and
    one part.

    Args:
        checkpoint: Lightning's checkpoint of this rank, with placeholders where a tensor is
            elsewhere and without the optimizer state of parameters that are elsewhere.
        mesh: The rank's place.

    Returns:
        The whole checkpoint on global rank 0, ``None`` elsewhere.

    Raises:
        PipelineError: If no rank holds some tensor.
    """
    if mesh.data_rank != 0:
        return None
    collects = mesh.global_rank == 0
    group = mesh.pipeline_group
    wanted = [(_missing(checkpoint), _known_states(checkpoint)) if collects else None]
    dist.broadcast_object_list(wanted, 0, group)
    assert wanted[0] is not None
    missing, known = wanted[0]
    parts: dict[_Path, Tensor] = {}
    states: list[dict[int, Any]] = [{} for _ in known]
    for rank in mesh.pipeline_ranks:
        if rank == 0:
            continue
        box: list[Any] = [None]
        if mesh.global_rank == rank:
            box = [_part(checkpoint, missing, known)]
            dist.send_object_list(box, 0, group)
        elif collects:
            dist.recv_object_list(box, rank, group)
            for path, tensor in box[0][0].items():
                parts.setdefault(path, tensor)
            for state, other in zip(states, box[0][1], strict=True):
                state.update(other)
    return _filled(checkpoint, parts, states) if collects else None


def _walk(value: Any, path: _Path = ()) -> Any:
    """All tensors of a checkpoint with their paths, optimizer states excepted."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if path or key != _OPTIMIZERS:
                yield from _walk(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def _missing(checkpoint: dict[str, Any]) -> list[_Path]:
    return [path for path, tensor in _walk(checkpoint) if is_elsewhere(tensor)]


def _known_states(checkpoint: dict[str, Any]) -> list[set[int]]:
    return [set(state["state"]) for state in checkpoint.get(_OPTIMIZERS, [])]


def _part(
    checkpoint: dict[str, Any], missing: list[_Path], known: list[set[int]]
) -> tuple[dict[_Path, Tensor], list[dict[int, Any]]]:
    """What this rank has of what global rank 0 misses, on the host."""
    wanted = set(missing)
    tensors = {
        path: tensor.detach().cpu()
        for path, tensor in _walk(checkpoint)
        if path in wanted and not is_elsewhere(tensor)
    }
    states = [
        {index: _to_host(entry) for index, entry in state["state"].items() if index not in seen}
        for state, seen in zip(checkpoint.get(_OPTIMIZERS, []), known, strict=True)
    ]
    return tensors, states


def _to_host(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return entry.detach().cpu()
    if isinstance(entry, dict):
        return {key: _to_host(item) for key, item in entry.items()}
    return entry


def _filled(
    checkpoint: dict[str, Any], parts: dict[_Path, Tensor], states: list[dict[int, Any]]
) -> dict[str, Any]:
    def fill(value: Any, path: _Path) -> Any:
        if isinstance(value, Tensor) and is_elsewhere(value):
            if path not in parts:
                raise PipelineError(
                    f"No rank holds {'.'.join(map(str, path))}, so the checkpoint would be "
                    "incomplete. This is a fault of the placement; please report it."
                )
            return parts[path]
        if isinstance(value, dict):
            whole = copy.copy(value)
            for key, item in value.items():
                whole[key] = fill(item, (*path, key))
            return whole
        if type(value) in (list, tuple):
            return type(value)(fill(item, (*path, i)) for i, item in enumerate(value))
        return value

    optimizers = checkpoint.get(_OPTIMIZERS)
    whole = fill({k: v for k, v in checkpoint.items() if k != _OPTIMIZERS}, ())
    if optimizers is not None:
        whole[_OPTIMIZERS] = [
            {**own, "state": dict(sorted({**own["state"], **others}.items()))}
            for own, others in zip(optimizers, states, strict=True)
        ]
    return whole


def load(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Loads the part of a state dict that this rank holds.

    Args:
        module: The module, whole or placed.
        state: State dict of the whole module.
        strict: Whether the names must agree exactly.

    Raises:
        RuntimeError: If they do not although they must, or shapes differ.
    """
    elsewhere = {name for *_, name, tensor in state_items(module) if is_elsewhere(tensor)}
    if not elsewhere:
        module.load_state_dict(state, strict=strict)
        return
    here = {name: value for name, value in state.items() if name not in elsewhere}
    result = module.load_state_dict(here, strict=False)
    missing = [name for name in result.missing_keys if name not in state]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"The checkpoint does not fit {type(module).__name__}: it lacks {missing} and has "
            f"{result.unexpected_keys} besides. Load it with strict=False to take what fits."
        )
