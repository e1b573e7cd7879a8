"""Whose an error is, and what of it is told to the user."""

from __future__ import annotations

import contextlib
import dis
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning
import torch
import torch.distributed as dist

from lightning_pipeline import errors
from lightning_pipeline.errors import PipelineError, SplitError

_OURS, _GROUPS, *_OTHERS = (
    str(Path(str(module.__file__)).parent) + os.sep for module in (errors, dist, lightning, torch)
)
_LIBRARIES = (_OURS, *_OTHERS, contextlib.__file__)

MOST = 16_000
"""Characters of an error that a rank writes for another one or into its place."""

_LOST_PEER = re.compile(
    "connection (closed|reset) by peer|caused pair closure|broken pipe|connection refused"
    "|nccl communicator was aborted|ncclremoteerror|remote process exit",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile("timed out waiting|timed out after|timeout", re.IGNORECASE)
_TOLD = "has_been_told"
_MOST_OF_LINE = 2000  # characters
_PATIENCE = 1.0  # seconds that writing may take


def has_lost_peer(error: BaseException) -> bool:
    """Whether a process group has raised an error because another rank is gone."""
    return _is_of_groups(error) and _LOST_PEER.search(str(error)) is not None


def has_timed_out(error: BaseException) -> bool:
    """Whether a process group has raised an error because it has waited for too long."""
    return _is_of_groups(error) and _TIMED_OUT.search(str(error)) is not None


def _is_of_groups(error: BaseException) -> bool:
    """Whether process groups have raised it, and not the user's code, whose words may be alike."""
    if not isinstance(error, RuntimeError) or isinstance(error, PipelineError):
        return False
    trace = error.__traceback__
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if code.co_filename.startswith((_OURS, _GROUPS)):
        return True
    raised = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return isinstance(error, dist.DistError) and not raised  # but by what was called there


def shorten(error: BaseException) -> None:
    """Leaves the user's own frames of an error that was raised on purpose, to tell the user.

    Its text says what is wrong and where. What torch or Python raised before is dropped if the text
    has the place of it too.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    raised = linecache.getline(file, line).strip().startswith("raise ")
    if not (raised and file.startswith(_OURS)):
        return
    trace = None
    for frame, line in reversed(frames):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            trace = TracebackType(trace, frame, frame.f_lasti, line)
    error.__traceback__ = trace  # a bare raise goes on with it, from Python 3.11 on
    if isinstance(error, SplitError) and error.location is not None:
        error.__cause__, error.__suppress_context__ = None, True


def shortened(error: BaseException) -> str:
    """The text of an error that goes on as it is."""
    kept = error.__traceback__, error.__cause__, error.__suppress_context__
    shorten(error)
    text = "".join(traceback.format_exception(error))
    error.__traceback__, error.__cause__, error.__suppress_context__ = kept
    return cut(text)


def kind_of(error: BaseException) -> str:
    """The line of an error itself, without its traceback and notes."""
    told = traceback.TracebackException(type(error), error, None)
    told.__notes__ = None  # type: ignore[attr-defined]
    return cut([*told.format_exception_only()][-1].strip(), _MOST_OF_LINE)


def cut(text: str, most: int = MOST) -> str:
    """``text``, or its beginning and its end if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    left_out = len(text) - most
    return f"{text[: most - end]}\n[... {left_out} characters are left out ...]\n{text[-end:]}"


def say_no_more_of(error: BaseException) -> None:
    """Keeps Python from printing ``error`` a second time when the process ends with it."""
    error.__dict__[_TOLD] = True
    show = sys.excepthook
    if not (isinstance(show, partial) and show.func is _show_news):
        sys.excepthook = partial(_show_news, show)


def _show_news(
    show: Callable[..., Any],
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
) -> None:
    """Shows what has not been told."""
    if not value.__dict__.get(_TOLD):
        show(kind, value, trace)


def stacks() -> str:
    """Where all threads of this process are, the main thread last."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    text = []
    for ident in sorted((i for i in frames if i != own), key=lambda i: i == main):
        lines = "".join(traceback.format_stack(frames[ident]))
        text.append(f"Thread {names.get(ident, ident)}:\n{lines}")
    return "".join(text)


def write(text: str) -> None:
    """Writes to stderr, for no longer than it may take: a pipe that nobody reads is full."""
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and no thread begins any more
        writer = threading.Thread(target=_write_now, args=(text,), daemon=True)
        writer.start()
        writer.join(_PATIENCE)


def _write_now(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
