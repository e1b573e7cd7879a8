"""Finding the user's line, and the checkpoint that it runs in, on the Python stack."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from lightning_pipeline.splitting.torch_private import CHECKPOINT_CODE, TORCH_DIRECTORY

RECORD_FILE = str(Path(__file__).with_name("record.py"))
PACKAGE_DIRECTORY = str(Path(__file__).parents[1])


def _is_user_file(name: str) -> bool:
    return not name.startswith((PACKAGE_DIRECTORY, TORCH_DIRECTORY, "<"))


def user_location() -> tuple[str, int] | None:
    """File and line of the innermost frame of the recorded forward; None after its end."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != RECORD_FILE:
        if _is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def definition_location(module: nn.Module) -> tuple[str, int] | None:
    """File and line at which the forward of ``module`` is defined."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not _is_user_file(code.co_filename):
        return None
    return code.co_filename, code.co_firstlineno


def error_location(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost user frame that ``error`` came through."""
    location, trace = None, error.__traceback__
    while trace is not None:
        if _is_user_file(trace.tb_frame.f_code.co_filename):
            location = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return location


def checkpoint_arguments(stop: Any) -> dict[str, Any] | None:
    """Local variables of the innermost ``torch.utils.checkpoint.checkpoint`` that is running.

    Args:
        stop: Code object of the frame at which the search ends.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not stop:
        if frame.f_code is CHECKPOINT_CODE:
            return dict(frame.f_locals)
        frame = frame.f_back
    return None


def checkpoint_frame() -> FrameType | None:
    """The innermost ``torch.utils.checkpoint.checkpoint`` that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CHECKPOINT_CODE:
        frame = frame.f_back
    return frame


def checkpointed_module(function: Any) -> nn.Module | None:
    """The module that a checkpointed function is, or is a method of."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
