"""Checkpoint folders: every rank writes what it holds, in torch.distributed.checkpoint's format.

    FOLDER/.metadata      torch's: which tensor is in which file
    FOLDER/__0_0.distcp   the tensors of one rank, and so on
    FOLDER/meta.pt        all else of Lightning's checkpoint

Tensors go by dotted names (``state_dict.net.0.weight``, ``optimizer_0.state.net.0.weight.exp_avg``)
as in the folders of Lightning's own sharding strategies, so nothing depends on the layout that
wrote them. The folder needs a file system that all nodes share.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import Tensor
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
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting import is_elsewhere

METADATA, REST = ".metadata", "meta.pt"  # the names that torch and Lightning use
_OWN = "lightning_pipeline"  # our key in meta.pt
_VERSION = 1


def is_folder(path: Any) -> bool:
    """Whether there is a complete checkpoint folder at a path."""
    return all(os.path.isfile(os.path.join(path, name)) for name in (METADATA, REST))


def remove(path: Any) -> None:
    """Removes the checkpoint at a path, be it a folder, a file or a link, if there is one.

    Raises:
        IsADirectoryError: If there is a folder that is no checkpoint.
    """
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif _blocks(path):
        raise _in_the_way(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


def _blocks(path: Any) -> bool:
    """Whether something is at a path that a checkpoint must not replace."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    return bool(os.listdir(path)) and not os.path.isfile(os.path.join(path, METADATA))


def _in_the_way(path: Any) -> IsADirectoryError:
    return IsADirectoryError(
        f"A checkpoint must not replace {str(path)!r}: it is a folder that holds something else. "
        "Save to another path, or remove the folder."
    )


@contextmanager
def replaced(path: Any) -> Iterator[None]:
    """Keeps what is at a path aside until something new stands there.

    A process that is killed meanwhile leaves the old checkpoint, at the path or beside it with
    ``.old`` behind its name; the next save to the path finds it there.
    """
    final = FilePath(path)
    old = final.with_name(final.name + ".old")
    is_there = final.exists() or final.is_symlink()
    if old.exists() and not is_there:
        old.rename(final)
        is_there = True
    remove(old)
    if is_there:
        if _blocks(final):
            raise _in_the_way(final)
        final.rename(old)
    yield
    remove(old)


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
    """
    if "://" in str(path):
        raise ValueError(
            f"A checkpoint folder must be on a file system that is mounted on all nodes, got "
            f"{str(path)!r}. Save to a local path, or use "
            "PipelineStrategy(save_distributed_checkpoint=False), which writes one file."
        )
    final = FilePath(path)
    part = final.with_name(final.name + ".part")
    blocked = [_blocks(final) if mesh.global_rank == 0 else None]
    dist.broadcast_object_list(blocked, 0)
    if blocked[0]:
        raise _in_the_way(final)
    if mesh.global_rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    if mesh.data_rank == 0:
        agreement = agree(checkpoint, mesh)  # no rank gets further before global rank 0 is here
        own = {
            _place(path, parameter_names): tensor
            for path, tensor in _own_tensors(checkpoint, agreement, mesh.global_rank)
        }
        writer = dcp.FileSystemWriter(part)
        dcp.save(_nested(own), storage_writer=writer, process_group=mesh.pipeline_group)
        if mesh.global_rank == 0:
            torch.save(_rest(checkpoint, agreement, parameter_names), part / REST)
            with replaced(final):
                part.rename(final)
    dist.barrier()


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
    return {**rest, _OWN: {"version": _VERSION, "keys": list(whole), "stored": stored, **own}}


def load(
    path: Any,
    weights_only: bool | None = None,
    stand_in: Callable[..., Tensor] | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint folder into a plain Lightning checkpoint, in the memory of the host.

    Args:
        path: The folder.
        weights_only: As in ``torch.load``, for what is not a tensor.
        stand_in: Makes what stands for a tensor that is read later, of its shape, its dtype and
            the function that reads it; ``None`` reads all tensors now.

    Raises:
        FileNotFoundError: If it is no complete checkpoint folder.
        ValueError: If something else wrote it.
    """
    folder = FilePath(path)
    if not is_folder(folder):
        raise FileNotFoundError(
            f"{str(path)!r} must be a checkpoint folder with the files {METADATA} and {REST}. "
            "PipelineStrategy(save_distributed_checkpoint=True) writes such folders; without these "
            "files the writing was interrupted."
        )
    rest = torch.load(folder / REST, map_location="cpu", weights_only=weights_only)
    own = rest.pop(_OWN, None)
    if own is None or own["version"] != _VERSION:
        raise ValueError(
            f"The checkpoint folder {str(path)!r} was not written by this version of the pipeline "
            "strategy. Load it with the strategy that wrote it, and save one file from there."
        )
    keys = {tuple(path): key for path, key in own["stored"]}
    reader = dcp.FileSystemReader(folder)
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    kinds = {
        key: (tuple(entries[key].size), entries[key].properties.dtype) for key in keys.values()
    }
    if stand_in is None:
        tensors = _read(reader, kinds)
    else:
        tensors = {
            key: stand_in(*kind, partial(lambda k: _read(reader, {k: kinds[k]})[k], key))
            for key, kind in kinds.items()
        }
    everything = {**rest, **own}
    return mapped(
        {key: everything[key] for key in own["keys"]},
        lambda path, tensor: tensors[keys[path]] if path in keys else tensor,
    )


def _read(
    reader: dcp.FileSystemReader, kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor]:
    """Values of some tensors of a folder, given their shapes and dtypes."""
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in kinds.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as we ask it to be
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def parameter_names(module: LightningModule, optimizer: Optimizer) -> dict[int, str]:
    """Dotted name of each parameter of an optimizer, by its number in the optimizer's state."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: names[id(p)] for i, p in enumerate(parameters) if id(p) in names}


def consolidate(folder: Any, file: Any = None) -> FilePath:
    """Turns a checkpoint folder into one plain Lightning file, with the model in memory once.

    Args:
        folder: A checkpoint folder from a trusted source: torch unpickles its metadata.
        file: The file to write; ``None`` is the folder's path with ``.consolidated`` behind it.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: If there is no such folder or it is no complete checkpoint.
        FileExistsError: If the file exists.
        ValueError: If something else wrote the folder.
    """
    source = FilePath(folder)
    if not source.is_dir():
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
    checkpoint = load(source, weights_only=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    torch.save(checkpoint, part)
    part.replace(target)
    return target
