"""Files and folders that are complete or not there, whenever a process or the machine stops.

What is written lies beside its place under another name until it is complete, and takes the place
at once. So does what goes: it leaves its place first. A name that a killed process leaves behind is
cleared when the place is written next. Two runs that write to one place have names of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

METADATA = ".metadata"  # of a checkpoint folder, as torch names it

_PART, _REMOVED = ".part", ".removed.part"
_LONG = 86400.0  # seconds after which what another host has begun is not being written any more
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, see renameat2(2)


def is_remote(path: Any) -> bool:
    """Whether a path is a URL, which fsspec opens."""
    return "://" in str(path)


def beside(path: Any) -> Path:
    """Where something of this process lies that is not in its place yet.

    Nothing takes it for a checkpoint: ``ckpt_path="last"`` goes by the beginning and the ending of
    a name, and Slurm's requeue by ``hpc_ckpt_`` anywhere in it.
    """
    return Path(path).with_name(f".{_hidden(path)}.{_host()}-{os.getpid()}{_PART}")


def _hidden(path: Any) -> str:
    return Path(path).name.replace("_", "-")


def _host() -> str:
    return re.sub(r"[^\w.]", "-", socket.gethostname()).replace("_", "-")


def _abandoned(path: Any) -> Iterator[Path]:
    """What lies beside a path and belongs to this process, or to none that is still there."""
    folder, begin = Path(path).parent, f".{_hidden(path)}."
    # A pattern would stay in a cache for each name of a checkpoint.
    for name in os.listdir(folder) if folder.is_dir() else ():
        if not (name.startswith(begin) and name.endswith(_PART)):
            continue
        part = folder / name
        host, _, number = name[len(begin) : -len(_PART)].rpartition("-")
        if not number.isdigit():
            continue
        if host != _host():  # nobody here knows whether it is still there
            gone = time.time() - part.lstat().st_mtime > _LONG
        else:
            gone = int(number) == os.getpid() or not _is_alive(int(number))
        if gone:
            yield part


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def old_of(path: Any) -> Path:
    """Where something lies that has left its place before the new one is there, see ``put``.

    It is whole, and ``ckpt_path="last"`` finds it by its name.
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.being-replaced{path.suffix}")


def standing(path: Any) -> Any:
    """The path, or where its old folder is if a process was killed while it was replaced."""
    old = old_of(path)
    return old if old.exists() and not os.path.lexists(path) else path


def check_place(path: Any) -> None:
    """Refuses a place that holds something else than a checkpoint.

    Raises:
        IsADirectoryError: If it is a folder with other files.
    """
    if not _is_folder(path) or not os.listdir(path):
        return
    if not os.path.isfile(os.path.join(path, METADATA)):
        raise IsADirectoryError(
            f"A checkpoint must not replace {str(path)!r}: it is a folder that holds something "
            "else. Save to another path, or remove the folder."
        )


@contextmanager
def whole_file(path: Any) -> Iterator[BinaryIO]:
    """A file to write, which stands at a path, on the disk, when the block ends well.

    Args:
        path: Its path on a local or mounted file system.

    Raises:
        IsADirectoryError: If there is a folder already that is no checkpoint.
    """
    final, part = Path(path), beside(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    clear(final)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put(part, final)
    except BaseException:
        with contextlib.suppress(OSError):
            erase(part)
        raise


def clear(path: Any) -> None:
    """Makes room for what is written next, where a process may have been killed before.

    Raises:
        IsADirectoryError: If there is a folder already that is no checkpoint.
    """
    check_place(path)
    place = standing(path)
    if place != path:
        os.rename(place, path)
    for left in (*_abandoned(path), old_of(path)):
        erase(left)


def put(part: Path, final: Path) -> None:
    """Moves a file, folder or link to its place, at once, and removes what was there."""
    if not _is_folder(final) and not (_is_folder(part) and os.path.lexists(final)):
        os.replace(part, final)
        sync(final.parent)
        return
    if _exchange(part, final):
        sync(final.parent)
        erase(part)
        return
    old = old_of(final)  # a file system that cannot exchange, such as NFS
    erase(old)
    os.rename(final, old)
    try:
        os.rename(part, final)
    except OSError:
        os.rename(old, final)
        raise
    sync(final.parent)
    erase(old)


def link(target: Any, path: Any) -> None:
    """Puts a relative symbolic link at a path, in place of what is there."""
    clear(path)
    os.symlink(os.path.relpath(target, os.path.dirname(path)), beside(path))
    put(beside(path), Path(path))


def erase(path: Any) -> None:
    """Removes the file, link or folder at a path, if there is one; a folder leaves it at once.

    What is left of one, because a process was killed or somebody reads it (on NFS), goes with the
    next that is removed there.
    """
    path = Path(path)
    if _is_folder(path):
        os.rename(path, path.with_name(f".{uuid.uuid4().hex}{_REMOVED}"))
    else:
        path.unlink(missing_ok=True)
    for gone in path.parent.glob(f".*{_REMOVED}"):
        shutil.rmtree(gone, ignore_errors=True)


def sync(folder: Path) -> None:
    """Makes the names in a folder outlive a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _is_folder(path: Any) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps what is at two paths, if system and file system can do so at once."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return done == 0
