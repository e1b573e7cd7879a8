"""The threads of gloo, which are to serve the threads that compute."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LOOP = "gloo_tcp_loop"
"""The name that gloo gives to the thread that moves its messages."""


def calm_gloo() -> None:
    """Keeps gloo's threads from taking the processor away from the one that they work for.

    A send wakes the receiver's thread while the sender holds the lock of the connection. Where
    there are no more processors than ranks, the woken thread takes the sender's place, wants that
    lock, and asks for it over and over for the few milliseconds that Linux grants it. As a batch
    thread (sched(7)) it has the same share of the processors, but does not push others aside.
    Elsewhere than on Linux, and where the process may not, nothing changes.
    """
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with contextlib.suppress(OSError):  # it may have ended, or be out of our hands
            if (task / "comm").read_text().strip() == _LOOP:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
