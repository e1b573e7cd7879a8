"""What breaks off the waits of a process for others."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch

from lightning_pipeline.splitting.torch_private import (
    backends_of,
    group_of_calls,
    process_groups,
)

_PROBE = 2**30
"""A tag that no message has."""


def break_off() -> None:
    """Ends every wait of this process for another rank, in collectives and messages.

    Gloo fails what is under way in a group when one of its messages has timed out. NCCL's
    communicators are aborted, all in one group of calls as torch does it when it shuts down
    (pytorch issue 119797); what was under way then returns without an error, and without a result.
    """
    aborted: list[Any] = []
    for group in process_groups():
        for backend in backends_of(group):
            with contextlib.suppress(Exception):
                if backend.name() == "nccl":
                    aborted.append(backend)
                    continue
                peer = (group.rank() + 1) % group.size()
                probe = backend.recv([torch.empty(1)], peer, _PROBE)
                probe.wait(timedelta(milliseconds=1))
    if aborted:
        start, end = [], []
        with contextlib.suppress(Exception):  # what wraps a backend may know no group of calls
            start, end = ([each] for each in group_of_calls(aborted[0]))
        for do in (*start, *(backend.abort for backend in aborted), *end):
            with contextlib.suppress(Exception):
                do()


def uses_nccl() -> bool:
    """Whether a process group has communicators of NCCL."""
    backends = (backend for group in process_groups() for backend in backends_of(group))
    return any(backend.name() == "nccl" for backend in backends)
