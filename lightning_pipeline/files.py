"""Checkpoint files: written whole, and checked when they are read."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_pipeline.checkpoint import walk
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.lightning_private import in_thread_of
from lightning_pipeline.replacing import erase, is_remote, whole_file
from lightning_pipeline.splitting.torch_private import FakeTensorMode, offset_in_file, record_offset

_ZIP, _END = b"PK\x03\x04", b"PK\x05\x06"
_FOLDER = 0x10  # attribute of a record that readers take for a folder, without any bytes
_TAIL = 1 << 16  # bytes at a file's end in which readers look for its list of records
_PIECE = 1 << 20  # bytes read at a time
_UNREADABLE = (RuntimeError, EOFError, LookupError, ValueError)  # of torch.load, at what is no zip
_ANOTHER = "Continue from another checkpoint."


class WholeFiles(TorchCheckpointIO):
    """Writes Lightning's checkpoint files so that they are complete or not there.

    Lightning's own way is kept for remote paths.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None or is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with written(path), whole_file(path) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if is_remote(path) or not os.path.isfile(path):
            return super().load_checkpoint(path, map_location, weights_only)
        check_file(path)
        with explained(path):
            loaded: dict[str, Any] = torch.load(
                path, map_location=map_location, weights_only=weights_only
            )
        return loaded

    @override
    def remove_checkpoint(self, path: Any) -> None:
        if is_remote(path):
            super().remove_checkpoint(path)
        else:
            erase(path)


def is_plain(plugin: CheckpointIO) -> bool:
    """Whether a plugin does no more than torch.save and torch.load."""
    return type(plugin) in (TorchCheckpointIO, WholeFiles)


def in_turn(plugin: CheckpointIO, work: Callable[[], None]) -> None:
    """Does something when all is written that was given to a plugin before.

    Args:
        plugin: If it writes in a thread, the work is done there too, unless writing has failed.
        work: What to do.
    """
    if isinstance(plugin, AsyncCheckpointIO):
        in_thread_of(plugin, work)
    else:
        work()


@contextmanager
def written(path: Any) -> Iterator[None]:
    """Errors of writing to a path name it.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    try:
        yield
    except IsADirectoryError:  # names it
        raise
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"The checkpoint {str(path)!r} must be written in full, but {first_line(cause)}. What "
            "was there before is still there. Make room, or save to another path."
        ) from error


def is_zip(path: Any) -> bool:
    """Whether a path has a local file that begins as those of torch.save do since torch 1.6."""
    if not os.path.isfile(path):
        return False
    with named(path), open(path, "rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def check_file(path: Any, checksums: bool = True) -> None:
    """Refuses a file that is not as torch.save left it.

    Args:
        path: A local file. One in the format that torch wrote before 1.6 cannot be checked.
        checksums: Whether the whole file is read, to compare each tensor with its checksum. What
            is not a tensor always is.

    Raises:
        CheckpointError: If it is empty, cut short or changed, or the disk cannot read it.
    """
    name, size = str(path), os.path.getsize(path)
    if not size:
        raise CheckpointError(f"The checkpoint {name!r} is empty. {_ANOTHER}")
    if not is_zip(path):
        return
    with named(path), open(path, "rb") as file:
        file.seek(max(0, size - _TAIL))
        if _END not in file.read():
            raise CheckpointError(
                f"The checkpoint {name!r} is cut short: it ends after {size} bytes without the "
                "list of its tensors, so its writing or copying was interrupted. Copy it again. "
                f"{_ANOTHER}"
            )
        record = damaged_record(file, checksums)
    if record is not None:
        raise CheckpointError(
            f"The checkpoint {name!r} is damaged in {_contents(path, record)}: it was changed "
            f"after it was written. Copy it again. {_ANOTHER}"
        )


def damaged_record(file: Any, tensors: bool = True) -> str | None:
    """Name of the first record of a file of torch.save that is not as it was written.

    Nothing but its checksums tells of a change, and none covers the list of the records: torch.save
    neither compresses nor encrypts, and marks no record as a folder.

    Args:
        file: The file or its bytes in memory, to be read from.
        tensors: Whether tensors are compared with their checksums, too.

    Returns:
        The name, or what is wrong with the list of records; ``None`` if all are well.

    Raises:
        OSError: If the disk cannot read the file.
    """
    where = "its list of records"
    try:
        with zipfile.ZipFile(file) as opened:
            for record in opened.infolist():
                where = record.filename
                plain = record.compress_type == zipfile.ZIP_STORED
                if record.external_attr & _FOLDER or not plain:
                    return where
                if record.file_size != record.compress_size:
                    return where
                with opened.open(record) as part:
                    while (tensors or "/data/" not in where) and part.read(_PIECE):
                        pass
    except MemoryError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the beginning
            raise
        return where
    except Exception:  # what zipfile raises at bytes that are no zip is of many kinds
        return where
    return None


def _contents(path: Any, record: str) -> str:
    """Dotted names of the tensors in a record of a file, if they can be told."""
    try:
        with FakeTensorMode():  # torch then notes where a tensor is, and reads none
            loaded = torch.load(path, weights_only=True)
        offset = record_offset(path, record.split("/", 1)[1])
        names = [
            ".".join(map(str, place))
            for place, tensor in walk(loaded)
            if offset_in_file(tensor) == offset
        ]
    except Exception:  # the file is damaged
        names = []
    return " and ".join(names) or record


@contextmanager
def named(path: Any) -> Iterator[None]:
    """Errors of reading name the file.

    Raises:
        CheckpointError: If the disk cannot read it.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise CheckpointError(
            f"The checkpoint {str(path)!r} must be readable, but {first_line(error)}. Copy it "
            f"again. {_ANOTHER}"
        ) from error


@contextmanager
def explained(path: Any) -> Iterator[None]:
    """Errors of torch.load name the file, after ``check_file``.

    Raises:
        CheckpointError: If torch.save did not write the file, or the disk cannot read it.
        UnpicklingError: If there is more in it than ``weights_only`` allows.
    """
    try:
        with named(path):
            yield
    except (CheckpointError, OSError, ImportError):
        raise
    except pickle.UnpicklingError as error:
        if is_zip(path):
            raise pickle.UnpicklingError(f"In {str(path)!r}: {error}") from None
        raise _foreign(path, error) from error
    except Exception as error:
        if is_out_of_memory(error) or (is_zip(path) and not isinstance(error, _UNREADABLE)):
            raise
        raise _foreign(path, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no room for a tensor, which says nothing about its file."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _foreign(path: Any, error: BaseException) -> CheckpointError:
    with open(path, "rb") as file:
        start = file.read(8)
    return CheckpointError(
        f"{str(path)!r} must be a file that torch.save wrote, but begins with {start!r} and cannot "
        f"be read as one ({first_line(error)}). Give the path of a checkpoint."
    )


def check_lightning(loaded: Any, path: Any) -> None:
    """Refuses what Lightning did not write.

    Raises:
        CheckpointError: If it is no dict with Lightning's version.
    """
    if isinstance(loaded, dict) and "pytorch-lightning_version" in loaded:
        return
    has = f"has the keys {list(loaded)[:5]}" if isinstance(loaded, dict) else "is none"
    raise CheckpointError(
        f"{str(path)!r} must be a checkpoint of Lightning, a dict with 'state_dict' and "
        f"'pytorch-lightning_version', but {has}. Weights alone are read by "
        f"PipelineStrategy(weights={Path(path).name!r})."
    )


def first_line(error: BaseException | None) -> str:
    """An error's class and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
