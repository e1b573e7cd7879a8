"""A thread in each process that ends it when another rank of its run has failed.

The main thread may be anywhere by then: in a collective that waits for the rank that failed, in the
user's code, on its way out. It has some seconds to come to its end by itself; then what it waits
for is broken off, and at last the process ends whatever its main thread does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lightning_pipeline.breaking import break_off, uses_nccl
from lightning_pipeline.lines import (
    PATIENCE,
    Bell,
    Caller,
    Exchange,
    Line,
    Word,
    are_apart,
    are_together,
    call,
    have_all_raised,
    left,
)
from lightning_pipeline.reporting import stacks, write
from lightning_pipeline.splitting.torch_private import default_store

GRACE = 3.0
"""Seconds that a rank has to hear of a failure in the order of its work."""
LIMIT = 7.0
"""Seconds from the failure of one rank to the end of all."""
ASKED = 20.0
"""Seconds without a sign of work from any rank, from which on a run that was asked to end counts as
failed: schedulers kill what is left 30 s after SIGTERM."""

_NEWS = 1.0  # seconds between two signs of work that a rank gives to the others
_LAST_ACTS = 2.5  # seconds in which a process ends that ends itself
_ORDER = ("left", "stall", "error", "lost")  # of what may be the cause of the others


class Watch(threading.Thread):
    """Hears of the failures of all ranks, and tells them this rank's own.

    Args:
        rank: Global rank of this process.
        size: Number of ranks.
        exchange: On rank 0, where the others call.
        line: On the others, the connection to rank 0.

    Attributes:
        run_number: Number of the run; 0 before the first.
        is_broken: Whether what this rank waited for in the run was broken off: what has come of it
            is worth nothing.
        moves: Gives a number that changes while this rank works.
        on_failure: Is called once in a run, when the first word of an early end is heard.
        on_sigterm: Is called when a rank was asked to end; the run then goes on to where all ranks
            end together.
        last_resort: Is called before this process ends itself.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange | None, line: Line | None) -> None:
        super().__init__(daemon=True, name="pipeline-watch")
        self.rank, self.size, self.run_number = rank, size, 0
        self._forget()
        self._exchange, self._lines = exchange, [line] if line is not None else []
        self._bell, self._selector = Bell(), selectors.DefaultSelector()
        self._changed = threading.Condition()
        self._words: list[Word] = []
        self._ended: dict[int, int] = {}
        self.is_broken = self._running = self._noticed = self._dumped = self._asked = False
        self._hindrance: Word | None = None
        self._since: float | None = None
        self._moved, self._told = 0.0, 0.0
        self._selector.register(self._bell.end, selectors.EVENT_READ, self._hear_bell)
        if exchange is not None:
            self._selector.register(exchange.server, selectors.EVENT_READ, self._answer)
        for line in self._lines:
            self._selector.register(line.connection, selectors.EVENT_READ, line)
        self.group = weakref.ref(dist.group.WORLD)

    # from the main thread

    def begin(self, run: int) -> None:
        """A run begins."""
        with self._changed:
            self.run_number, self._running = run, True
            self.is_broken = self._noticed = self._dumped = self._asked = False
            self._since = None
            self._words = [w for w in self._words if w.run >= run or w.kind == "left"]
        self._bell.listen()
        self._bell.ring()

    def end(self) -> None:
        """This rank is through with the run, in whatever way."""
        if self._running:
            self._running = False
            self._bell.rest()
            self.say("ended")
        self._forget()

    def failure_at_the_end(self) -> Word | None:
        """Waits on rank 0, which is done, for the others' ends of the run; tells of a failure."""

        def failure() -> Word | None:
            words = (w for w in self._failures() if w.kind != "signal")
            return min(words, key=lambda w: w.kind == "lost", default=None)

        def is_over() -> bool:
            ends = (self._ended.get(line.peer, 0) for line in list(self._lines))
            return failure() is not None or all(run >= self.run_number for run in ends)

        if self.rank:
            return None
        with self._changed:
            self._changed.wait_for(is_over)
            return failure()

    def hindrance(self) -> Word | None:
        """Why the groups of the ranks can be used no more, before another run begins.

        Of a run that has failed, messages may be under way for ever. This waits for the ends of
        the others, for as long as it takes a rank to be ended.
        """

        def failures() -> list[Word]:
            run = self.run_number
            words = (w for w in self._words if w.kind == "left" or w.run == run)
            return [w for w in words if w.kind != "signal"]

        def is_known() -> bool:
            ends = (self._ended.get(rank, 0) for rank in range(self.size))
            return are_apart(failures()) or all(run >= self.run_number for run in ends)

        with self._changed:
            if self._hindrance is None and failures():
                self._changed.wait_for(is_known, LIMIT + _LAST_ACTS)
                found = failures()
                if self.is_broken or not are_together(found, self.size):
                    self._hindrance = min(found, key=lambda w: _ORDER.index(w.kind))
            return self._hindrance

    def _forget(self) -> None:
        """Lets go of the strategy of a run, and of all that it holds."""
        self.moves: Callable[[], float] = float
        self.on_failure: Callable[[], None] = _nothing
        self.on_sigterm: Callable[[], None] = _nothing
        self.last_resort: Callable[[], None] = _nothing

    def say(self, kind: Any, text: str = "", moment: str = "") -> None:
        """Tells all ranks what has happened on this one, in this run; see :class:`Word`."""
        word = Word(kind, self.run_number, self.rank, text, moment)
        self._take(word)
        for line in list(self._lines):
            line.send(word)
        self._bell.ring()

    def cause(self, patience: float = PATIENCE) -> Word | None:
        """Why this rank cannot go on: what another one has said first, or what it was sent.

        Args:
            patience: Seconds that the word of it may take to come.
        """

        def first() -> Word | None:
            words = [w for w in self._failures() if w.kind != "lost"]
            words = [w for w in words if w.rank != self.rank or w.kind == "signal"]
            return min(words, key=lambda w: w.kind == "left", default=None)

        with self._changed:
            self._changed.wait_for(lambda: first() is not None, patience)
            return first()

    # in the thread

    def run(self) -> None:
        """Listens until the process ends."""
        while True:
            soon = 0.2 if self._since is not None and self._running else None
            try:
                for key, _ in self._selector.select(soon):
                    if isinstance(key.data, Line):
                        self._hear(key.data)
                    elif isinstance(key.data, Caller):
                        self._greet(key.data)
                    else:
                        key.data()
                if self._running:
                    self._act()
            except Exception:
                write(f"[rank {self.rank}] goes on watching behind this:\n{traceback.format_exc()}")
                time.sleep(1)

    def _answer(self) -> None:
        assert self._exchange is not None
        caller = self._exchange.answer()
        if caller is not None:
            self._selector.register(caller.connection, selectors.EVENT_READ, caller)

    def _greet(self, caller: Caller) -> None:
        if not caller.hear():
            return
        self._selector.unregister(caller.connection)
        line = caller.line
        if line is None:
            caller.connection.close()
            return
        self._lines.append(line)  # first: the main thread may say something now
        for word in self._words:
            line.send(word)
        self._selector.register(line.connection, selectors.EVENT_READ, line)
        if len(self._lines) == self.size - 1:
            self._hang_up()

    def _hang_up(self) -> None:
        """All ranks have called: nobody else is listened to any more."""
        assert self._exchange is not None
        callers = [k for k in self._selector.get_map().values() if isinstance(k.data, Caller)]
        for end in [self._exchange.server, *(key.data.connection for key in callers)]:
            self._selector.unregister(end)
            end.close()

    def _hear(self, line: Line) -> None:
        words = line.receive()
        if words is None:
            self._selector.unregister(line.connection)
            self._lines.remove(line)
            line.connection.close()
            run = self._ended.get(line.peer, 0) + 1
            words = [Word("left", run, line.peer, left(line.peer, line.place))]
        for word in words:
            self._take(word)
            for other in self._lines if self.rank == 0 else ():
                if other is not line:
                    other.send(word)

    def _hear_bell(self) -> None:
        numbers = self._bell.heard()  # or it would wake the thread again
        for number in numbers if self._running else ():
            handler = signal.getsignal(number)
            interrupts = number == signal.SIGINT and handler is signal.default_int_handler
            if interrupts or number == signal.SIGTERM:
                name = signal.Signals(number).name
                self.say("signal", f"Rank {self.rank} (process {os.getpid()}) was sent {name}.")

    def _take(self, word: Word) -> None:
        with self._changed:
            if word.kind == "ended":
                self._ended[word.rank] = word.run
                self._changed.notify_all()
                return
            if word.kind == "moves":
                self._since = time.monotonic() if self._asked else self._since
                return
            self._words.append(word)
            self._changed.notify_all()

    def _failures(self) -> list[Word]:
        """What stands in the way of this run; a rank that has left does so for ever."""
        run = self.run_number
        return [w for w in self._words if w.run == run or (w.kind == "left" and w.run <= run)]

    @property
    def end_in_order(self) -> bool:
        """Whether each rank has raised an error by itself, so that none waits for another."""
        with self._changed:
            failures = self._failures()
        return have_all_raised(failures, self.size)

    def _has_raised(self, failures: list[Word]) -> bool:
        return any(w.kind == "error" and w.rank == self.rank for w in failures)

    def _act(self) -> None:
        """Does what is due."""
        with self._changed:
            failures = self._failures()
        if not failures:
            self._since = None
            return
        asked = all(w.kind == "signal" and "SIGTERM" in w.text for w in failures)
        self._notice(failures, asked)
        if self.end_in_order:
            self._since = None  # which may take its time
            return
        apart = are_apart(failures)
        now = time.monotonic()
        if self._since is None or asked != self._asked:
            self._since, self._asked = now, asked
        if asked:
            self._look_for_work(now)
        grace, limit = (ASKED, ASKED + LIMIT - GRACE) if asked else (GRACE, LIMIT)
        waited = now - self._since
        if waited > limit:
            self._end_process(failures, limit)
        elif waited > grace and not self.is_broken and (apart or not self._has_raised(failures)):
            self.is_broken = True
            # In a thread of its own: an abort of NCCL may itself wait, this thread must not.
            threading.Thread(target=break_off, daemon=True, name="pipeline-break-off").start()

    def _look_for_work(self, now: float) -> None:
        """Starts to wait anew where this rank has moved, and lets the others do so."""
        moved = self.moves()
        if moved == self._moved:
            return
        self._moved, self._since = moved, now
        if now - self._told > _NEWS:
            self._told = now
            self.say("moves")

    def _notice(self, failures: list[Word], asked: bool) -> None:
        if not self._noticed:
            self._noticed = True
            self.on_failure()
            if self.rank == 0 and uses_nccl():
                # torch's own watch over NCCL may end this process before its main thread hears.
                write("\n".join(w.text for w in failures))
        if asked:
            self.on_sigterm()
        stalls = [w.text for w in failures if w.kind == "stall"]
        if stalls and not self._dumped:
            self._dumped = True
            write(f"[rank {self.rank}] {stalls[0]}\n{stacks()}")

    def _end_process(self, failures: list[Word], limit: float) -> None:
        end = threading.Timer(_LAST_ACTS, os._exit, (1,))
        end.daemon = True
        end.start()
        why = "\n".join(w.text for w in failures if w.kind != "lost")
        write(
            f"\n[rank {self.rank}] is ended, {limit:g} s after a word that it did not react to."
            f"\n{why}\nIt was here:\n{stacks()}"
        )
        with contextlib.suppress(Exception):
            self.last_resort()
        for child in multiprocessing.active_children():  # such as workers of a loader
            child.kill()
        os._exit(1)

    def close(self) -> None:
        """Ends it in a process that has been forked, where its thread is not."""
        for line in self._lines:
            line.connection.close()
        if self._exchange is not None:
            self._exchange.server.close()
        self._selector.close()
        self._bell.close()


_watches: list[Watch] = []
"""The one of this process, if there is one."""


def connected() -> Watch | None:
    """The watch of this process, if it has met the other ranks."""
    there = _watches and dist.is_initialized() and _watches[-1].group() is dist.group.WORLD
    return _watches[-1] if there else None


def connect(hosts: Sequence[str]) -> Watch | None:
    """The watch of this process; all ranks call it when they have met.

    Args:
        hosts: Names of the host of rank 0, the address that it listens at first.

    Returns:
        ``None`` if there is no other rank, or rank 0 cannot be reached, of which a warning tells.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if (known := connected()) is not None:
        return known
    if size == 1:
        return None
    store = dist.PrefixStore("lightning_pipeline", default_store())
    exchange = Exchange(store, hosts, size) if rank == 0 else None
    line = call(store, rank) if rank else None
    if exchange is None and line is None:
        warnings.warn(
            f"Rank {rank} cannot reach rank 0 at any of {', '.join(hosts)}, so a rank that fails "
            "is noticed by the timeout of its peers alone. Open the ports between the hosts, or "
            "set MASTER_ADDR to an address of rank 0 that all of them reach.",
            stacklevel=2,
        )
        return None
    watch = Watch(rank, size, exchange, line)
    _watches[:] = [watch]
    watch.start()
    return watch


def _leave_to_parent() -> None:
    while _watches:
        _watches.pop().close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _nothing() -> None:
    """Has nothing to do."""
