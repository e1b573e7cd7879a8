"""Runs a function on several forked gloo ranks, each with a deadline."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=30)


class RankFailed(AssertionError):
    """A rank raised, died or met the deadline; the message holds what all of them said."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline: float = 60
) -> list[Any]:
    """Runs ``function(*args)`` on ``world_size`` ranks and returns their results by rank.

    The ranks are forked, with a torchrun environment and a process group that met over a file. A
    rank that is stuck in a collective ignores SIGTERM, so the deadline ends with SIGKILL.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, world_size, folder, function, args) for rank in range(world_size)]
        codes = _wait(children, deadline)
        failures = [Path(folder, f"{rank}.error") for rank in range(world_size)]
        if any(codes):
            said = "\n".join(f.read_text() for f in failures if f.exists())
            raise RankFailed(f"exit codes by rank: {codes}\n{said}")
        return [
            torch.load(Path(folder, f"{rank}.result"), weights_only=False)
            for rank in range(world_size)
        ]


def _fork(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # a collection in the child would copy all that it shares with its parent
    try:
        _join(rank, world_size, folder)
        torch.save(function(*args), Path(folder, f"{rank}.result"))
        code = 0
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _join(rank: int, world_size: int, folder: str) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="test",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _wait(children: list[int], deadline: float) -> list[int]:
    """Exit codes; once one rank has failed the others get a short grace to fail by themselves."""
    end = time.monotonic() + deadline
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child]:
                        end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = -signal.SIGKILL
        time.sleep(0.005)
    return [codes[child] for child in children]
