"""The words of ranks beside their groups, and what breaks off a wait."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_pipeline import breaking, reporting, watch
from lightning_pipeline.actions import Action
from lightning_pipeline.activities import Wait
from lightning_pipeline.lines import Bell, Exchange, Line, Word, call
from lightning_pipeline.lowering import Transfer
from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.whereabouts import Position, describe


def test_words_arrive_whole_however_they_are_cut():
    near, far = socket.socketpair()
    line = Line.__new__(Line)
    line.connection, line._rest = far, b""
    words = [Word("error", 1, 2, "two\nlines"), Word("ended", 3, 0)]
    data = b"".join(json.dumps(word).encode() + b"\n" for word in words)
    found = []
    for start in range(0, len(data), 7):
        near.sendall(data[start : start + 7])
        found += line.receive()
    assert found == words
    near.close()
    assert line.receive() is None


def answered(exchange):
    """The rank that calls, once it has said all; ``None`` if it is none."""
    caller = None
    while caller is None:
        caller = exchange.answer()
    while not caller.hear():
        pass
    if caller.line is None:
        caller.connection.close()
    return caller.line


STRANGERS = {
    "a guess": json.dumps(["a guess", 1, "here"]).encode() + b"\n",
    "another language": b'["\\u00e9", 1, "here"]\n',
    "deep": b"[" * 999 + b"\n",
    "no list": b"GET / HTTP/1.1\r\n\r\n",
    "endless": b"[1" * 600,
    "no rank": b"",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_not_answered(said):
    exchange = Exchange(dist.HashStore(), ["localhost"], 2)
    assert exchange.answer() is None
    stranger = socket.create_connection(exchange.server.getsockname()[:2])
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    assert answered(exchange) is None
    is_read = len(said) <= 1000 and said.count(b"\n") <= 1
    with contextlib.nullcontext() if is_read else contextlib.suppress(ConnectionError):
        assert stranger.recv(1) == b""
    exchange.server.close()


def test_nobody_waits_for_one_who_calls_and_says_nothing():
    exchange = Exchange(dist.HashStore(), ["localhost"], 2)
    stranger = socket.create_connection(exchange.server.getsockname()[:2])
    caller = exchange.answer() or exchange.answer()
    for byte in b"[1, ":
        stranger.sendall(bytes([byte]))
        assert not caller.hear()
    exchange.server.close()


def test_ranks_of_the_run_are_answered():
    store = dist.HashStore()
    exchange = Exchange(store, ["nowhere.invalid", "localhost"], 2)
    line = call(store, 1)
    line.send(Word("lost", 4, 1, "x" * 100_000))  # before anybody has heard the greeting
    known = answered(exchange)
    assert known.peer == 1 and known.place.startswith("process ")
    received = []
    while not received:
        received = known.receive()
    assert received[0][:3] == ("lost", 4, 1) and len(received[0].text) == 20_000
    known.connection.close()
    assert line.receive() is None
    exchange.server.close()


def test_a_rank_0_that_is_not_there_is_told():
    store = dist.HashStore()
    exchange = Exchange(store, ["localhost"], 2)
    exchange.server.close()
    assert call(store, 1) is None


def test_a_bell_tells_signals_from_rings():
    bell = Bell()
    bell.ring()
    bell._other.send(bytes([15]))
    assert bell.heard() == {15} and bell.heard() == set()
    bell.close()


ERRORS = [Word("error", 1, rank, "failed") for rank in (0, 1)]


def test_a_launcher_kills_no_rank_that_saves_although_all_have_failed(monkeypatch):
    monkeypatch.setattr(watch, "GRACE", 0.0)
    there = SimpleNamespace(WORLD=SimpleNamespace)
    monkeypatch.setattr(watch, "dist", SimpleNamespace(group=there))
    told = []
    made = watch.Watch(0, 2, None, None)
    made.begin(1)
    made.on_failure = lambda: told.append(1)
    for word in ERRORS:  # both are there before it looks
        made._take(word)
    made._act()
    made._bell.close()
    assert told == [1] and made._since is None and not made.is_broken


def test_all_is_over_within_ten_seconds():
    """From the failure of a rank, or from a signal of SLURM to its SIGKILL."""
    assert watch.GRACE < watch.LIMIT and watch.LIMIT + watch._LAST_ACTS < 10
    assert watch.ASKED + watch.LIMIT - watch.GRACE + watch._LAST_ACTS < 30


def hears_of_a_failure(prepare):
    """A process whose main thread sits still when another rank has failed."""
    watch.GRACE, watch.LIMIT, watch._LAST_ACTS = 0.2, 0.5, 1.5
    watch.dist = SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace))
    made = watch.Watch(1, 2, None, None)
    made.begin(1)
    prepare(made)
    made.start()
    made._take(Word("left", 1, 0, "gone"))
    made._bell.ring()
    time.sleep(60)


def waits_for_ever(made):
    watch.break_off = lambda: time.sleep(60)


def nobody_reads(made):
    _, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, bytes(1 << 12))
    os.set_blocking(end, True)
    for number in (1, 2):
        os.dup2(end, number)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def hangs_at_last(made):
    made.last_resort = lambda: time.sleep(60)


@pytest.mark.parametrize("prepare", [waits_for_ever, nobody_reads, hangs_at_last])
def test_nothing_keeps_a_process_from_its_end(prepare):
    child = os.fork()
    if not child:
        try:
            hears_of_a_failure(prepare)
        finally:
            os._exit(7)
    end = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 1 and ended[0] == child


def test_nobody_is_listened_to_once_all_ranks_have_called(monkeypatch):
    monkeypatch.setattr(watch, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=None)))
    monkeypatch.setattr(watch.weakref, "ref", lambda world: lambda: world)
    store = dist.HashStore()
    exchange = Exchange(store, ["localhost"], 3)
    place = exchange.server.getsockname()[:2]
    made = watch.Watch(0, 3, exchange, None)
    made.start()
    first = call(store, 1)
    stranger = socket.create_connection(place)
    second = call(store, 2)
    assert stranger.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)
    first.send(Word("lost", 1, 1, "still heard"))
    second.connection.settimeout(5)
    assert second.receive() == [Word("lost", 1, 1, "still heard")]


class Backend:
    """Notes what is done with it; its abort fails, as that of a broken communicator may."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._name, self._done = name, done

    def name(self) -> str:
        return self._name

    def recv(self, tensors, peer, tag):
        self._done.append(f"recv from {peer}")
        return SimpleNamespace(wait=self.fail)

    def fail(self, timeout=None):
        raise RuntimeError("timed out")

    def _group_start(self):
        self._done.append("start")

    def _group_end(self):
        self._done.append("end")

    def abort(self):
        self._done.append("abort")
        self.fail()


def test_communicators_of_nccl_are_aborted_in_one_group_of_calls(monkeypatch):
    done: list[str] = []
    devices = {torch.device("cpu"): "gloo", torch.device("cuda"): "nccl"}
    groups = [
        SimpleNamespace(
            _device_types=list(devices),
            _get_backend=lambda device: Backend(devices[device], done),
            rank=lambda: 1,
            size=lambda: 2,
        )
        for _ in range(2)
    ]
    monkeypatch.setattr(breaking, "process_groups", lambda: groups)
    breaking.break_off()
    assert done == ["recv from 0"] * 2 + ["start", "abort", "abort", "end"]
    assert breaking.uses_nccl()
    monkeypatch.delattr(Backend, "_group_start")
    done.clear()
    breaking.break_off()
    assert done == ["recv from 0"] * 2 + ["abort", "abort"]


def test_stacks_name_the_threads():
    begun, end = threading.Event(), threading.Event()

    def sits_still():
        begun.set()
        end.wait()

    thread = threading.Thread(target=sits_still, name="a thread of its own")
    thread.start()
    begun.wait()
    text = []
    other = threading.Thread(target=lambda: text.append(reporting.stacks()))
    other.start()
    other.join()
    end.set()
    assert "Thread a thread of its own:" in text[0] and "in sits_still" in text[0]
    assert text[0].index("Thread MainThread:") > text[0].index("a thread of its own")


MESH = Mesh(MeshSizes(2, 2), get_schedule("1F1B"), global_rank=1)  # the last stage, replica 1
PLAN = SimpleNamespace(
    stages=[SimpleNamespace(modules=("net.0", "net.1")), SimpleNamespace(modules=("net.2",))]
)


@pytest.mark.parametrize(
    ("activity", "words"),
    [
        (Action(1, "F", 3), "in the forward of stage 1 (net.2), microbatch 3"),
        (Action(1, "B", 0), "in the backward of stage 1 (net.2), microbatch 0"),
        (Action(1, "W", 0), "in the weight gradients of stage 1 (net.2), microbatch 0"),
        (
            Wait("F", 1, 2),
            "waiting for the values of microbatch 2 for stage 1 (net.2) from rank 3",
        ),
        (
            Wait("B", 0, 2),
            "waiting for the gradients of microbatch 2 for stage 0 (net.0-1) from rank 1",
        ),
        (Wait("batch"), "waiting for the word of all ranks that they begin with the same batch"),
        (
            Transfer(True, "B", 0, 1, 0),
            "sending the gradients of microbatch 1 for stage 0 (net.0-1) to rank 3",
        ),
        ("else", "at the end of a pass over stage 1 (net.2), what it sent is not taken yet"),
        (None, "between two passes over stage 1 (net.2)"),
    ],
)
def test_where_a_rank_is(activity, words):
    assert describe(activity, MESH, PLAN) == words
    assert describe(activity, MESH, None) == words.replace(" (net.2)", "").replace(" (net.0-1)", "")


def test_a_position_is_told_beside_an_observer():
    position, seen = Position(), []
    position.also(seen.append)("else")
    position.note(None)
    assert (position.activity, position.count, seen) == (None, 2, ["else"])
