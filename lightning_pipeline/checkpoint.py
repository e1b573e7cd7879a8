"""One plain Lightning checkpoint out of the parts that the ranks of a pipeline hold, and back.

The ranks first agree, in small messages, on who gives what global rank 0 lacks. Then the tensors
travel one by one, or every rank writes its own (see `sharded`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting import canonical_names, is_elsewhere, state_items

Path = tuple[Any, ...]
"""Keys and indices that lead to a value in a checkpoint."""

STATE_DICT, OPTIMIZERS = "state_dict", "optimizer_states"


class Spec(NamedTuple):
    """Stands for a tensor that another rank holds.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class Agreement(NamedTuple):
    """Who gives what global rank 0 lacks; equal on all ranks of its pipeline.

    Attributes:
        given: For each path the global rank that gives it, and the value there with a ``Spec`` for
            each tensor. An optimizer's state of a parameter is one value.
        same: Path in ``given`` of each placeholder; tied weights are given once.
    """

    given: dict[Path, tuple[int, Any]]
    same: dict[Path, Path]

    def filled(
        self,
        checkpoint: dict[str, Any],
        leaf: Callable[[Path, Any], Any],
    ) -> dict[str, Any]:
        """The whole checkpoint of global rank 0, made by ``leaf``.

        Args:
            checkpoint: The checkpoint of global rank 0.
            leaf: Makes what stands for a tensor (or for a ``Spec`` of another rank) at a path; for
                tied weights it is the path of the first.
        """
        outlines = {path: outline for path, (_, outline) in self.given.items()}

        def own_or_given(path: Path, tensor: Tensor) -> Any:
            first = self.same.get(path)
            return leaf(path, tensor) if first is None else leaf(first, outlines[first])

        whole: dict[str, Any] = mapped(checkpoint, own_or_given)
        if OPTIMIZERS not in whole:
            return whole
        whole[OPTIMIZERS] = [
            {**own, "state": dict(own["state"])} if "state" in own else own
            for own in whole[OPTIMIZERS]
        ]
        for path, outline in outlines.items():
            if is_optimizer_entry(path):
                whole[OPTIMIZERS][path[1]]["state"][path[3]] = mapped(outline, leaf, path)
        for own in whole[OPTIMIZERS]:
            if "state" in own:
                own["state"] = dict(sorted(own["state"].items()))
        return whole


def agree(checkpoint: dict[str, Any], mesh: Mesh) -> Agreement:
    """Finds out who gives what global rank 0 lacks; all ranks of its pipeline call it.

    Args:
        checkpoint: Lightning's checkpoint of this rank, with placeholders where a tensor is
            elsewhere and without the optimizer state of parameters that are elsewhere.
        mesh: The rank's place.

    Raises:
        PipelineError: If no rank holds some tensor.
    """
    box: list[Any] = [None]
    if mesh.global_rank == 0:
        box = [(_missing(checkpoint), set(_entries(checkpoint)))]
    dist.broadcast_object_list(box, 0, mesh.pipeline_group)
    same, known = box[0]
    mine: dict[Path, Any] = {}
    if mesh.global_rank != 0:
        mine = _offers(checkpoint, set(same.values()), known)
    offers: list[Any] = [None] * len(mesh.pipeline_ranks)
    dist.all_gather_object(offers, mine, mesh.pipeline_group)
    given: dict[Path, tuple[int, Any]] = {}
    for rank, offer in zip(mesh.pipeline_ranks, offers, strict=True):
        for path, outline in offer.items():
            given.setdefault(path, (rank, outline))
    for path in same.values():
        if path not in given:
            raise PipelineError(
                f"No rank holds {'.'.join(map(str, path))}, so the checkpoint would be "
                "incomplete. Either a callback or hook put it there on global rank 0 alone, or "
                "this is a fault of the placement: then please report it."
            )
    return Agreement(given, same)


def gather(checkpoint: dict[str, Any], mesh: Mesh, device: torch.device) -> dict[str, Any] | None:
    """Fills the checkpoint of global rank 0 with what the other ranks of its pipeline hold.

    A message is one tensor. Global rank 0 holds the file being written and its own part, the
    others nothing besides their own.

    Args:
        checkpoint: Lightning's checkpoint of this rank, see ``agree``.
        mesh: The rank's place.
        device: The rank's device, from which tensors are sent.

    Returns:
        The whole checkpoint on global rank 0, on the host; ``None`` elsewhere.

    Raises:
        PipelineError: If no rank holds some tensor.
    """
    if mesh.data_rank != 0:
        return None
    agreement, group = agree(checkpoint, mesh), mesh.pipeline_group
    received: dict[Path, Tensor] = {}
    for path, (owner, outline) in agreement.given.items():
        if mesh.global_rank == owner:
            for _, tensor in walk(at(checkpoint, path)):
                _send(tensor, device, group)
        elif mesh.global_rank == 0:
            for inner, spec in walk(outline):
                whole_path = (*path, *inner)
                received[whole_path] = _receive(spec, owner, device, group)
    if mesh.global_rank != 0:
        return None
    moved: dict[Any, Tensor] = {}
    return agreement.filled(
        checkpoint,
        lambda path, value: received[path] if isinstance(value, Spec) else _to_host(value, moved),
    )


def _send(tensor: Tensor, device: torch.device, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.send(_as_bytes(tensor.detach().to(device).contiguous()), 0, group)


def _receive(spec: Spec, owner: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    value = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if value.numel():
        dist.recv(_as_bytes(value), owner, group)
    return value.cpu()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # backends do not know every dtype


def _to_host(tensor: Tensor, moved: dict[Any, Tensor]) -> Tensor:
    """The tensor on the host; one that comes twice, such as a tied weight, is moved once."""
    if tensor.device.type == "cpu":
        return tensor
    key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    if key not in moved:
        moved[key] = tensor.detach().cpu()
    return moved[key]


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All tensors (and ``Spec``) in nested dicts, lists and tuples, with their paths."""
    if isinstance(value, (Tensor, Spec)):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))


def mapped(value: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same nest with ``leaf(path, tensor)`` for each tensor (and ``Spec``).

    What holds none that changes is not copied, so it may be of any class.
    """
    if isinstance(value, (Tensor, Spec)):
        return leaf(path, value)
    if isinstance(value, dict):
        items = {key: mapped(item, leaf, (*path, key)) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        whole = copy.copy(value)  # keeps its class and the versions that hang on a state dict
        whole.update(items)
        return whole
    if isinstance(value, (list, tuple)):
        parts = [mapped(item, leaf, (*path, index)) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def at(value: Any, path: Path) -> Any:
    """What is at a path."""
    for key in path:
        value = value[key]
    return value


def is_optimizer_entry(path: Path) -> bool:
    """Whether the path leads to an optimizer's state of one parameter."""
    return len(path) == 4 and path[0] == OPTIMIZERS and path[2] == "state"


def _entries(checkpoint: dict[str, Any]) -> dict[Path, Any]:
    """The state of each parameter, of all optimizers."""
    return {
        (OPTIMIZERS, number, "state", index): entry
        for number, optimizer in enumerate(checkpoint.get(OPTIMIZERS, []))
        for index, entry in optimizer.get("state", {}).items()
    }


def _missing(checkpoint: dict[str, Any]) -> dict[Path, Path]:
    """The placeholders, each with the path of the first that stands for the same tensor."""
    first: dict[Any, Path] = {}
    missing = {}
    for path, tensor in walk(checkpoint):
        if is_elsewhere(tensor):
            # Elsewhere, say in a callback's state, an old value may go by the same name.
            is_weight = path[0] == STATE_DICT and len(path) == 2
            missing[path] = first.setdefault(tensor.elsewhere_name if is_weight else path, path)
    return missing


def _offers(checkpoint: dict[str, Any], wanted: set[Path], known: set[Path]) -> dict[Path, Any]:
    """What this rank has of what global rank 0 lacks, without the tensors' values."""

    def outline(_: Path, tensor: Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tensor.dtype)

    offers = {
        path: outline(path, tensor)
        for path, tensor in walk(checkpoint)
        if path in wanted and not is_elsewhere(tensor)
    }
    for path, entry in _entries(checkpoint).items():
        if path not in known:
            offers[path] = mapped(entry, outline)
    return offers


def load(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Loads the part of a state dict that this rank holds.

    Args:
        module: The module, whole or placed.
        state: State dict of the whole module.
        strict: Whether the names must agree exactly.

    Raises:
        RuntimeError: If they do not although they must, or shapes differ.
    """
    foreign = {name: t for *_, name, t in state_items(module) if is_elsewhere(t)}
    elsewhere = {name for name, first in canonical_names(module).items() if first in foreign}
    if not elsewhere:
        module.load_state_dict(state, strict=strict)
        return
    _check_shapes({name: foreign[canonical_names(module)[name]] for name in elsewhere}, state)
    here = {name: value for name, value in state.items() if name not in elsewhere}
    result = module.load_state_dict(here, strict=False)
    missing = [name for name in result.missing_keys if name not in state]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"It lacks {missing} and has {result.unexpected_keys} besides. Set "
            "strict_loading=False in the LightningModule to take what fits."
        )


def _check_shapes(own: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Lets all ranks refuse alike, not only the one that holds the tensor."""
    for name, tensor in own.items():
        saved = state.get(name)
        if isinstance(saved, Tensor) and saved.shape != tensor.shape:
            raise RuntimeError(
                f"size mismatch for {name}: its shape is {tuple(saved.shape)} there and "
                f"{tuple(tensor.shape)} in the model."
            )
