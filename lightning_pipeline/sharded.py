"""Checkpoint folders: every rank writes what it holds, in torch.distributed.checkpoint's format.

    FOLDER/.metadata      torch's: which tensor is in which file
    FOLDER/__0_0.distcp   the tensors of one rank, and so on
    FOLDER/meta.pt        all else of Lightning's checkpoint

Tensors go by dotted names (``state_dict.net.0.weight``, ``optimizer_0.state.net.0.weight.exp_avg``)
as in the folders of Lightning's own sharding strategies, so nothing depends on the layout that
wrote them. The folder needs a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from lightning_pipeline.checkpoint import (
    OPTIMIZERS,
    STATE_DICT,
    Agreement,
    Path,
    agree,
    at,
    mapped,
    walk,
)
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.files import check_file, explained, first_line
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.replacing import (
    METADATA,
    beside,
    clear,
    erase,
    is_remote,
    put,
    standing,
    sync,
    whole_file,
)
from lightning_pipeline.shards import OWN, Shards, save_key
from lightning_pipeline.splitting import is_elsewhere

REST = "meta.pt"  # as Lightning names it
_VERSION = 1


def is_folder(path: Any) -> bool:
    """Whether there is a complete checkpoint folder at a path."""
    return all(os.path.isfile(os.path.join(standing(path), name)) for name in (METADATA, REST))


def save(
    checkpoint: dict[str, Any],
    path: Any,
    mesh: Mesh,
    parameter_names: Sequence[dict[int, str]],
) -> None:
    """Writes a checkpoint folder; all ranks call it and return when it is complete.

    It is written beside the path and moved there at the end, so that a path never leads to half a
    checkpoint, or to files of two.

    Args:
        checkpoint: Lightning's checkpoint of this rank, see ``agree``.
        path: Where the folder shall be.
        mesh: The rank's place.
        parameter_names: Dotted name of each parameter by its number, for each optimizer.

    Raises:
        ValueError: If the path is not one of a local or mounted file system.
        IsADirectoryError: If there is a folder already that is no checkpoint.
        PipelineError: If no rank holds some tensor.
        CheckpointError: On all ranks, if one could not write.
    """
    if is_remote(path):
        raise ValueError(
            f"A checkpoint folder must be on a file system that is mounted on all nodes, got "
            f"{str(path)!r}. Save to a local path, or use "
            "PipelineStrategy(save_distributed_checkpoint=False), which writes one file."
        )
    number, part = _begin(path, mesh)
    failure: BaseException | None = None
    if mesh.data_rank == 0:
        agreement = agree(checkpoint, mesh)
        own = {
            _place(path, parameter_names): tensor
            for path, tensor in _own_tensors(checkpoint, agreement, mesh.global_rank)
        }
        own[save_key(mesh.global_rank)] = torch.tensor(number)
        try:
            writer = dcp.FileSystemWriter(part)
            dcp.save(_nested(own), storage_writer=writer, process_group=mesh.pipeline_group)
            if mesh.global_rank == 0:
                rest = _rest(checkpoint, agreement, parameter_names)
                rest[OWN]["save"] = number
                _finish(rest, part, path)
        except (Exception, CheckpointException) as error:
            failure = error
    _end(failure, part, path, mesh)


def _begin(path: Any, mesh: Mesh) -> tuple[int, FilePath]:
    """Makes room for a folder; returns a number for this save and where it is made, for all."""
    box: list[Any] = [None, 0, beside(path)]
    if mesh.global_rank == 0:
        try:
            clear(path)
        except OSError as error:
            box[0] = error
        box[1] = uuid.uuid4().int >> 66
    dist.broadcast_object_list(box, 0)
    if box[0] is not None:
        raise box[0]
    return box[1], box[2]


def _finish(rest: dict[str, Any], part: FilePath, path: Any) -> None:
    """Completes the folder beside a path and moves it there."""
    rest[OWN]["list"] = zlib.crc32((part / METADATA).read_bytes())
    with open(part / REST, "wb") as file:
        torch.save(rest, file)
        file.flush()
        os.fsync(file.fileno())
    sync(part)
    put(part, FilePath(path))


def _end(failure: BaseException | None, part: FilePath, path: Any, mesh: Mesh) -> None:
    """Ends a save on all ranks alike; global rank 0 knows what has failed on any."""
    told = [None if failure is None else _why(failure)]
    if mesh.global_rank == 0 and failure is not None:
        with contextlib.suppress(OSError):
            erase(part)
    dist.broadcast_object_list(told, 0)
    if told[0] is not None or failure is not None:
        raise CheckpointError(
            f"The checkpoint folder {str(path)!r} must be written in full, but "
            f"{told[0] or _why(failure)}. What was there before is still there. Make room, or "
            "save to another path that all nodes share."
        ) from failure


def _why(failure: BaseException | None) -> str:
    failures = getattr(failure, "failures", {})
    texts = [f"{_shard(rank)}: {first_line(error)}" for rank, (error, _) in failures.items()]
    return "; ".join(texts) or first_line(failure)


def _shard(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _own_tensors(
    checkpoint: dict[str, Any], agreement: Agreement, rank: int
) -> list[tuple[Path, Tensor]]:
    """What this rank writes: global rank 0 what it has, the others what they give it."""
    if rank == 0:
        return [
            (path, tensor)
            for path, tensor in walk(checkpoint)
            if path[0] in (STATE_DICT, OPTIMIZERS) and not is_elsewhere(tensor)
        ]
    # A tied weight is there under each of its names, for readers that ask for all of them.
    paths = {path: path for path in agreement.given} | agreement.same
    return [
        ((*path, *inner), tensor)
        for path, first in paths.items()
        if agreement.given[first][0] == rank
        for inner, tensor in walk(at(checkpoint, path))
    ]


def _place(path: Path, parameter_names: Sequence[dict[int, str]]) -> tuple[str, ...]:
    """Where a tensor of a checkpoint is in the folder: keys of nested dicts."""
    if path[0] == STATE_DICT:
        place = path
    elif path[0] == OPTIMIZERS:
        _, number, kind, index, *inner = path
        name = parameter_names[number].get(index, index)
        place = (f"optimizer_{number}", kind, name, *inner)
    else:
        place = ("elsewhere", *path)
    return tuple(map(str, place))


def _nested(tensors: dict[tuple[str, ...], Tensor]) -> dict[str, Any]:
    nest: dict[str, Any] = {}
    for place, tensor in tensors.items():
        inner = nest
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
        inner[place[-1]] = tensor.detach()
    return nest


def _rest(
    checkpoint: dict[str, Any], agreement: Agreement, parameter_names: Sequence[dict[int, str]]
) -> dict[str, Any]:
    """What goes into meta.pt: the checkpoint with an empty tensor for each that is beside it."""
    first: dict[Path, Path] = {}  # of the names of a tied weight, so that it is read once
    seen: dict[Any, Path] = {}
    for path, tensor in _own_tensors(checkpoint, agreement, 0):
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first[path] = seen.setdefault(key, path) if tensor.numel() else path
    for path, (_, outline) in agreement.given.items():
        first |= {(*path, *inner): (*path, *inner) for inner, _ in walk(outline)}
    first |= agreement.same
    whole = agreement.filled(
        checkpoint, lambda path, value: torch.empty(0) if path in first else value
    )
    stored = [
        (path, ".".join(_place(first[path], parameter_names)))
        for path, _ in walk(whole)
        if path in first
    ]
    own = {key: whole[key] for key in (STATE_DICT, OPTIMIZERS) if key in whole}
    rest = {key: value for key, value in whole.items() if key not in own}
    return {**rest, OWN: {"version": _VERSION, "keys": list(whole), "stored": stored, **own}}


def load(
    path: Any,
    weights_only: bool | None = None,
    stand_in: Callable[..., Tensor] | None = None,
    *,
    together: bool = False,
) -> dict[str, Any]:
    """Reads a checkpoint folder into a plain Lightning checkpoint, in the memory of the host.

    A folder of another save may take its place meanwhile: what is read is of one save.

    Args:
        path: The folder.
        weights_only: As in ``torch.load``, for what is not a tensor.
        stand_in: Makes what stands for a tensor that is read later, of its shape, its dtype and
            the function that reads it; ``None`` reads all tensors now.
        together: Whether all ranks call it, and shall read the same save.

    Raises:
        FileNotFoundError: If it is no complete checkpoint folder.
        ValueError: If something else wrote it.
        CheckpointError: If a file is missing, damaged or of another save.
    """
    folder = FilePath(standing(path))
    if not is_folder(folder):
        lacks = " and ".join(n for n in (METADATA, REST) if not (folder / n).is_file())
        raise FileNotFoundError(
            f"{str(path)!r} must be a checkpoint folder with the files {METADATA} and {REST}, and "
            f"lacks {lacks}. PipelineStrategy(save_distributed_checkpoint=True) writes such "
            "folders; without these files the writing or copying was interrupted."
        )
    check_file(folder / REST)
    with explained(folder / REST):
        rest = torch.load(folder / REST, map_location="cpu", weights_only=weights_only)
    own = rest.pop(OWN, None)
    if own is None or own["version"] != _VERSION:
        raise ValueError(
            f"The checkpoint folder {str(path)!r} was not written by this version of the pipeline "
            "strategy. Load it with the strategy that wrote it, and save one file from there."
        )
    keys = {tuple(path): key for path, key in own["stored"]}
    shards = Shards(folder, own.get("list"))
    shards.check(keys.values(), own.get("save"))
    if together:
        _require_one_save(path, own.get("save"))
    if stand_in is None:
        tensors = {key: shards.read(key) for key in dict.fromkeys(keys.values())}
    else:
        tensors = {
            key: stand_in(*shards.kind(key), partial(shards.read, key)) for key in keys.values()
        }
    everything = {**rest, **own}
    return mapped(
        {key: everything[key] for key in own["keys"]},
        lambda path, tensor: tensors[keys[path]] if path in keys else tensor,
    )


def _require_one_save(path: Any, number: int | None) -> None:
    """Refuses a folder of which rank 0 reads another save than this rank."""
    box = [number]
    dist.broadcast_object_list(box, 0)
    if box[0] != number:
        raise CheckpointError(
            f"All ranks must read the same save from {str(path)!r}, but another run has saved "
            "there while they began to read it. Start again, or read a copy."
        )


def parameter_names(module: LightningModule, optimizer: Optimizer) -> dict[int, str]:
    """Dotted name of each parameter of an optimizer, by its number in the optimizer's state."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: names[id(p)] for i, p in enumerate(parameters) if id(p) in names}


def consolidate(folder: Any, file: Any = None, weights_only: bool | None = None) -> FilePath:
    """Turns a checkpoint folder into one plain Lightning file, with the model in memory once.

    Args:
        folder: A checkpoint folder.
        file: The file to write; ``None`` is the folder's path with ``.consolidated`` behind it.
        weights_only: As in ``torch.load``. ``False`` takes objects of any class, which can run
            code: for a folder from a trusted source.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: If there is no such folder or it is no complete checkpoint.
        FileExistsError: If the file exists.
        ValueError: If something else wrote the folder.
        CheckpointError: If one of its files is missing, damaged or of another save.
        UnpicklingError: If there is more in it than ``weights_only`` allows.
    """
    source = FilePath(folder)
    if not standing(source).is_dir():
        raise FileNotFoundError(
            f"A checkpoint folder must exist, and {str(folder)!r} does not in {os.getcwd()} or is "
            "a file. One file needs no consolidation."
        )
    target = FilePath(file) if file is not None else source.with_name(f"{source.name}.consolidated")
    if target.exists():
        raise FileExistsError(
            f"The file to write must not exist, and {str(target)!r} does. Remove it or give "
            "another path behind the folder."
        )
    checkpoint = load(source, weights_only)
    with whole_file(target) as opened:
        torch.save(checkpoint, opened)
    return target
