"""The files of a checkpoint folder that hold tensors, read without running what is in them."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata

from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.files import damaged_record, first_line, is_out_of_memory, named
from lightning_pipeline.replacing import METADATA
from lightning_pipeline.splitting.torch_private import MEMORY_FORMAT, STORAGE_INFO, get_layout

OWN = "lightning_pipeline"
"""Key of what says which save a file is from."""

_TOGETHER = (
    "Copy the whole folder again from where it was written, or continue from another checkpoint."
)

# What torch 2.13 pickles into the list of tensors; nothing here does more than hold values.
_PLAIN = {
    **{
        (metadata.__name__, kind.__qualname__): kind
        for kind in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            MEMORY_FORMAT,
        )
    },
    (STORAGE_INFO.__module__, STORAGE_INFO.__qualname__): STORAGE_INFO,
    ("torch", "Size"): torch.Size,
    (get_layout.__module__, get_layout.__qualname__): get_layout,
}
_PATHS = ("PosixPath", "WindowsPath")  # where it was written, which is not looked at


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what a list of tensors consists of."""

    def find_class(self, module: str, name: str) -> Any:
        known = _PLAIN.get((module, name))
        if known is not None:
            return known
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return pathlib.PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no list of tensors needs")


def _check_place(info: Any) -> None:
    """Refuses where a tensor shall be if that is no part of a file of the folder."""
    path, offset, length = info.relative_path, info.offset, info.length
    if Path(path).name != path or "\0" in path or min(offset, length) < 0:
        raise ValueError(f"it has a tensor in {path!r} at {offset}, of {length} bytes")


def save_key(rank: int) -> tuple[str, str]:
    """Where a rank's file has the number of its save: keys of nested dicts."""
    return OWN, f"save_{rank}"


class Shards:
    """Tensors in the files of a checkpoint folder, by dotted name.

    Args:
        folder: The folder.
        checksum: CRC-32 of the list of its tensors; ``None`` if it was saved without.

    Raises:
        CheckpointError: If the list is not the one that was written, or cannot be read.
    """

    def __init__(self, folder: Path, checksum: int | None) -> None:
        self._folder = folder
        self._opened: dict[str, int] = {}
        with named(folder / METADATA):
            data = (folder / METADATA).read_bytes()
        if checksum is not None and zlib.crc32(data) != checksum:
            raise CheckpointError(
                f"{str(folder / METADATA)!r} must be of the same save as the files beside it, and "
                f"is of another or damaged. {_TOGETHER}"
            )
        try:
            listed = _Unpickler(io.BytesIO(data)).load()
            self._kinds = {
                name: (tuple(entry.size), entry.properties.dtype)
                for name, entry in listed.state_dict_metadata.items()
            }
            self._places = {index.fqn: info for index, info in listed.storage_data.items()}
            for info in self._places.values():
                _check_place(info)
            if self._places.keys() != self._kinds.keys():
                raise ValueError("it has tensors without a place")
        except Exception as error:  # what pickle raises at damaged bytes is of many kinds
            raise CheckpointError(
                f"{str(folder / METADATA)!r} must be the list of tensors that torch wrote, but "
                f"cannot be read as one ({first_line(error)}). {_TOGETHER}"
            ) from error

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor."""
        return self._kinds[name]

    def check(self, names: Iterable[str], number: int | None) -> None:
        """Refuses a folder whose files are not all there, whole and of one save.

        Args:
            names: What shall be read.
            number: Number of the save; ``None`` if it has none.

        Raises:
            CheckpointError: Says which file is at fault, and a tensor in it.
        """
        first: dict[str, str] = {}
        for name in names:
            if name not in self._places:
                raise CheckpointError(
                    f"{str(self._folder / METADATA)!r} must list the tensor {name} and does not, "
                    f"so it is of another save than the files beside it. {_TOGETHER}"
                )
            first.setdefault(self._places[name].relative_path, name)
        missing = [file for file in first if not (self._folder / file).is_file()]
        if missing:
            raise CheckpointError(
                f"The checkpoint folder {str(self._folder)!r} lacks {', '.join(missing)}, with "
                f"{first[missing[0]]} and more. {_TOGETHER}"
            )
        for name, place in self._places.items():
            size = self._size(place.relative_path)
            if place.offset + place.length > size:
                raise CheckpointError(
                    f"{str(self._folder / place.relative_path)!r} must have "
                    f"{place.offset + place.length} bytes for {name}, and has {size}. {_TOGETHER}"
                )
        if number is not None:
            self._check_number(first, number)

    def _open(self, file: str) -> int:
        """Descriptor of a file, once for all reads: another save may take the folder's place."""
        if file not in self._opened:
            self._opened[file] = os.open(self._folder / file, os.O_RDONLY)
            weakref.finalize(self, os.close, self._opened[file])
        return self._opened[file]

    def _bytes(self, place: Any) -> bytes:
        """Those of a tensor; a system gives some 2 GiB at most in one call."""
        number, parts, read = self._open(place.relative_path), [], 0
        while part := os.pread(number, place.length - read, place.offset + read):
            parts.append(part)
            read += len(part)
        return b"".join(parts)

    def _size(self, file: str) -> int:
        path = self._folder / file
        return os.fstat(self._open(file)).st_size if path.is_file() else 0

    def _check_number(self, files: Iterable[str], number: int) -> None:
        prefix = ".".join(save_key(0))[:-1]
        marks = {
            place.relative_path: name
            for name, place in self._places.items()
            if name.startswith(prefix)
        }
        for file in files:
            try:
                same = file in marks and int(self.read(marks[file])) == number
            except CheckpointError:
                same = False
            if not same:
                raise CheckpointError(
                    f"{str(self._folder / file)!r} must be of the same save as the files beside "
                    f"it, and is of another or damaged. {_TOGETHER}"
                )

    def read(self, name: str) -> Tensor:
        """A tensor, in the memory of the host.

        Raises:
            CheckpointError: If its bytes are not those that were written.
        """
        place = self._places[name]
        path = self._folder / place.relative_path
        with named(path):
            data = io.BytesIO(self._bytes(place))
        damaged = CheckpointError(
            f"{str(path)!r} is damaged in {name}: it was changed after it was written. {_TOGETHER}"
        )
        if damaged_record(data) is not None:
            raise damaged
        data.seek(0)
        try:
            value: Tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise damaged from error
        if (tuple(value.shape), value.dtype) != self.kind(name):
            raise CheckpointError(
                f"{name} must have shape and dtype {self.kind(name)} by {METADATA}, and has "
                f"{(tuple(value.shape), value.dtype)} in {str(path)!r}. {_TOGETHER}"
            )
        return value
