"""Runs a function on several forked gloo ranks of this machine, each with a deadline."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=30)

_CLONE_NEWNET = 0x40000000


class RankFailed(RuntimeError):
    """A rank raised, died or met the deadline; the message holds what all of them said."""


class DeadlineMet(RankFailed):
    """The ranks were killed because they had not ended, none because another one failed."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 60,
    namespaces: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs ``function(*args)`` on ``world_size`` ranks and returns their results by rank.

    The ranks are forked, with a torchrun environment and a process group that met over a file. A
    rank that is stuck in a collective ignores SIGTERM, so the deadline ends with SIGKILL. A rank
    ends as soon as its result is written, whatever threads it has.

    Args:
        world_size: Number of ranks.
        function: What each rank runs.
        args: Its arguments.
        deadline: Seconds until the ranks are killed.
        namespaces: Network namespaces of the ranks by rank, as ``ip netns`` names them; empty for
            that of this process.
        environment: Variables that the ranks have besides.

    Raises:
        RankFailed: If a rank did not end by itself and well.
        DeadlineMet: If that is all that is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            place = _Place(rank, world_size, folder, dict(environment or {}))
            place.namespace = namespaces[rank] if namespaces else None
            children.append(_fork(place, function, args))
        codes = _wait(children, deadline)
        failures = [Path(folder, f"{rank}.error") for rank in range(world_size)]
        if any(codes):
            said = "\n".join(f.read_text() for f in failures if f.exists())
            kind = DeadlineMet if set(codes) <= {0, -signal.SIGKILL} else RankFailed
            raise kind(f"exit codes by rank: {codes}\n{said}")
        return [
            torch.load(Path(folder, f"{rank}.result"), weights_only=False)
            for rank in range(world_size)
        ]


class _Place:
    """Where one rank is."""

    def __init__(
        self, rank: int, world_size: int, folder: str, environment: dict[str, str]
    ) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.environment = environment
        self.namespace: str | None = None

    def join(self) -> None:
        """Makes this process the rank."""
        if self.namespace is not None:
            _enter_network(self.namespace)
        os.environ.update(
            OMP_NUM_THREADS="1",
            TORCHELASTIC_RUN_ID="ranks",
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
        )
        os.environ.update(self.environment)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/rendezvous",
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )


def _enter_network(name: str) -> None:
    """Moves this process into a network namespace (Python has ``os.setns`` from 3.12 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")


def _fork(place: _Place, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # a collection in the child would copy all that it shares with its parent
    try:
        place.join()
        torch.save(function(*args), Path(place.folder, f"{place.rank}.result"))
        code = 0
    except BaseException:
        text = f"rank {place.rank}: {traceback.format_exc()}"
        Path(place.folder, f"{place.rank}.error").write_text(text)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
