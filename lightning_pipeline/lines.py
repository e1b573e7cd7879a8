"""Words between ranks that travel beside the process groups, and tell of a process that has ended.

Every rank has one connection to rank 0. The system closes it when a process ends in whatever way,
also by SIGKILL, and gives it up where a host is gone; a process that is merely slow keeps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch.distributed as dist

from lightning_pipeline.meeting import open_server

PATIENCE = 2.0
"""Seconds that a rank is waited for when it connects or takes a word."""

_LONGEST_GREETING = 1000  # bytes
_MOST_CHARACTERS = 20_000  # of a text, which a rank must be able to leave without being read
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a host is gone in 30 s


class Word(NamedTuple):
    """What ranks tell each other.

    Attributes:
        kind: ``"error"`` that a rank has raised by itself, ``"lost"``: it cannot go on without
            another one, ``"stall"``: it has waited for too long, ``"signal"`` that has come to it,
            ``"left"``: its process is gone, ``"ended"``: it is through with the run, ``"moves"``:
            it works.
        run: Number of the run.
        rank: Global rank.
        text: What to tell the user; the first line says it all.
        moment: What ranks that fail with nothing under way between them have in common.
    """

    kind: Literal["error", "lost", "stall", "signal", "left", "ended", "moves"]
    run: int
    rank: int
    text: str = ""
    moment: str = ""


def left(rank: int, place: str) -> str:
    """What to tell of a rank whose process is gone."""
    where = f" ({place})" if place else ""
    return (
        f"Rank {rank}{where} is gone without a word, as a process is by SIGKILL (by hand, by the "
        "kernel when memory runs out, see dmesg, or by a scheduler), by a crash in C code, with "
        "its host, or when it has ended by itself (its own output then says why)."
    )


def are_apart(failures: Sequence[Word]) -> bool:
    """Whether ranks that have failed are at different places."""
    return any(w.kind in ("left", "lost", "stall") for w in failures)


def have_all_raised(failures: Sequence[Word], size: int) -> bool:
    """Whether each rank has raised an error by itself, so that none waits for another."""
    raised = {w.rank for w in failures if w.kind == "error"}
    return len(raised) == size and not are_apart(failures)


def are_together(failures: Sequence[Word], size: int) -> bool:
    """Whether all ranks have failed by themselves at one moment: no message is under way."""
    moments = {w.moment for w in failures if w.kind == "error"}
    return have_all_raised(failures, size) and len(moments) == 1


class Line:
    """One end of a connection.

    Args:
        connection: The socket.
        peer: Global rank at the other end.
        place: Process and host at the other end.
    """

    def __init__(self, connection: socket.socket, peer: int, place: str = "") -> None:
        self.connection, self.peer, self.place = connection, peer, place
        self._rest = b""
        self._lock = threading.Lock()
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, word: Word) -> None:
        """Sends a word, or nothing if the peer has gone."""
        word = word._replace(text=word.text[:_MOST_CHARACTERS])
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(word).encode() + b"\n")

    def receive(self) -> list[Word] | None:
        """The words that have come, ``None`` if the peer has gone; waits for something."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [Word(*json.loads(part)) for part in whole]


class Exchange:
    """Where rank 0 takes the calls of the others.

    Args:
        store: What all ranks share.
        hosts: Names by which others may reach this host, the address to listen at first.
        size: Number of ranks.
    """

    def __init__(self, store: dist.Store, hosts: Sequence[str], size: int) -> None:
        self._key = secrets.token_hex()
        self.server = _open(hosts[0], size)
        self.server.setblocking(False)
        port = self.server.getsockname()[1]
        store.set("watch", json.dumps([list(hosts), port, self._key]))

    def answer(self) -> Caller | None:
        """Somebody who calls; ``None`` if nobody does any more."""
        try:
            connection, _ = self.server.accept()
        except OSError:  # gone again, or no descriptor is left
            return None
        return Caller(connection, self._key)


class Caller:
    """Somebody who has called rank 0 and has to say who it is; nobody waits for that.

    Args:
        connection: The socket.
        key: What ranks of the run know.

    Attributes:
        line: The connection with a rank, once it has said so.
    """

    def __init__(self, connection: socket.socket, key: str) -> None:
        self.connection, self._key, self._said = connection, key.encode(), b""
        self.line: Line | None = None
        connection.setblocking(False)

    def hear(self) -> bool:
        """Takes what it says; returns whether it is through, a rank or not."""
        try:
            data = self.connection.recv(_LONGEST_GREETING, socket.MSG_PEEK)
            end = data.find(b"\n") + 1 or len(data)
            data = self.connection.recv(end)  # what comes behind the greeting are words
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._said += data
        if data and not data.endswith(b"\n") and len(self._said) < _LONGEST_GREETING:
            return False
        try:
            key, rank, place = json.loads(self._said)
            if secrets.compare_digest(str(key).encode(), self._key):
                self.line = Line(self.connection, int(rank), str(place))
        except (ValueError, TypeError, RecursionError):
            pass  # it speaks another language
        return True


def _open(host: str, size: int) -> socket.socket:
    """A server at one address; where it is that of a gateway, calls to any address are taken."""
    try:
        return open_server(host, 0, size)
    except OSError:
        return open_server("", 0, size)


def call(store: dist.Store, rank: int) -> Line | None:
    """Connects this rank with rank 0; ``None`` if it cannot be reached.

    Args:
        store: What all ranks share.
        rank: This rank.
    """
    hosts, port, key = json.loads(store.get("watch"))
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=PATIENCE)
            place = f"process {os.getpid()} on {socket.gethostname()}"
            connection.sendall(json.dumps([key, rank, place]).encode() + b"\n")
            return Line(connection, 0, "")
    return None


class Bell:
    """Wakes a thread that waits for sockets, also when a signal comes to the process.

    The system rings it, so it is heard while the main thread is in a call that does not return.
    """

    def __init__(self) -> None:
        self.end, self._other = socket.socketpair()
        self.end.setblocking(False)
        self._other.setblocking(False)
        self._before: int | None = None

    def ring(self) -> None:
        """Wakes the thread."""
        with contextlib.suppress(OSError):
            self._other.send(b"\0")

    def heard(self) -> set[int]:
        """The signals that have come."""
        with contextlib.suppress(OSError):
            return set(self.end.recv(4096)) - {0}
        return set()

    def listen(self) -> None:
        """Listens to signals from now on, if this is the main thread."""
        if self._before is None and threading.current_thread() is threading.main_thread():
            number = self._other.fileno()
            self._before = signal.set_wakeup_fd(number, warn_on_full_buffer=False)

    def rest(self) -> None:
        """Listens to signals no more."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
            self._before = None

    def close(self) -> None:
        """Ends it in a process that has been forked."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        self.end.close()
        self._other.close()
