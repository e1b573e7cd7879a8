"""Peaks of memory: of what torch gave out in one step, and of what a process has resident."""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile


class AllocatedPeak(L.Callback):
    """Peak of what torch's CPU allocator gave out during one step, above what there was before.

    What another thread frees, as gloo's do with messages, counts as kept: the profiler sees its own
    thread alone.

    Args:
        step: Number of the batch that is measured, on every rank.

    Attributes:
        bytes: The peak, once the step is over.
    """

    def __init__(self, step: int = 2) -> None:
        self._step, self.bytes = step, 0
        self._profile: Any = None

    def on_train_batch_start(self, *args: Any) -> None:
        """Begins to record."""
        if args[-1] == self._step:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def on_train_batch_end(self, *args: Any) -> None:
        """Reads the record."""
        if args[-1] == self._step:
            self._profile.stop()
            self.bytes = _peak(self._profile)


def _peak(measured: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        measured.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    given = most = 0
    for event in memory:
        given += event["args"]["Bytes"]
        most = max(most, given)
    return most


_M_MMAP_THRESHOLD = -3


def return_memory_at_once() -> None:
    """Gives every large tensor pages of its own, which the kernel gets back when it is freed."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def reset_resident_peak() -> None:
    """Lets the kernel's peak of this process' resident memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """Peak of this process' resident memory since `reset_resident_peak`, in bytes."""
    return _status("VmHWM")


def resident() -> int:
    """This process' resident memory now, in bytes."""
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux.")
