"""Whatever goes wrong on one rank ends all of them soon, and the user hears what it was."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.faults.__main__ import FAULTS, run
from lightning_pipeline import failing, watch
from tests.distributed.fits import Script
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import vectors
from tests.models.modules import Perceptron

SECONDS = 8.0
"""From the start of the ranks, on a busy machine; the watch of a test has less patience."""


class Impatient(Script):
    """A script whose watch lets a second pass where a user's lets more."""

    def __call__(self, strategy: Any, devices: int) -> Any:
        watch.GRACE, watch.LIMIT, watch.ASKED = 0.5, 2.0, 1.0
        failing.PATIENCE = timedelta(seconds=1)
        return super().__call__(strategy, devices)


class Happens(L.Callback):
    """Calls something on one rank, behind the second batch."""

    def __init__(self, rank: int, what: Callable[[L.Trainer], Any]) -> None:
        self.rank, self.what = rank, what

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == self.rank:
            self.what(trainer)


class Fails(Perceptron):
    """A layer fails in the second batch."""

    def __init__(self, error: type[BaseException], layer: int) -> None:
        super().__init__()
        self.error = error
        self.net[layer].register_forward_pre_hook(self.fail)

    def fail(self, *args: Any) -> None:
        if self.trainer.fit_loop.total_batch_idx == 1 and self.trainer.global_step:
            raise self.error("my own mistake")


class FailsInLoss(Perceptron):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.trainer.global_rank == 0:
            raise ValueError("my own mistake")
        return loss


class Rows(Dataset):
    """Data that cannot be read on rank 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 40 and os.environ["RANK"] == "1":
            raise ValueError("my own mistake")
        row = torch.arange(6.0, dtype=torch.float64)
        return row, row[:3]


class Reads(Impatient):
    def loader(self, training):
        return DataLoader(Rows(), self.batch_size, num_workers=1)


def mistake(trainer: L.Trainer) -> None:
    raise ValueError("my own mistake")


def sleep(trainer: L.Trainer) -> None:
    time.sleep(100)


def send(number: int, trainer: L.Trainer) -> None:
    os.kill(os.getpid(), number)


def save(trainer: L.Trainer) -> None:
    trainer.strategy.checkpoint_io.save_checkpoint = mistake


class Saves(Happens):
    """All ranks save; one of them cannot."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if batch_idx == 1:
            trainer.save_checkpoint("/nowhere/at/all.ckpt")


def fails(model=Perceptron, *callbacks, script=Impatient):
    trainer = {"callbacks": list(callbacks), "limit_val_batches": 0}
    return script(model, lambda: vectors(160), trainer=trainer)


def ended(script: Script, ranks: int = 2, replicas: int = 1, **arguments: Any) -> str:
    """What the ranks say when all of them have ended by themselves, and soon."""
    begun = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        script.pipelined(ranks, replicas, deadline=30, **arguments)
    took, text = time.monotonic() - begun, str(caught.value)
    assert took < SECONDS + ranks * replicas, text
    return text


INTERRUPTED = r"was sent SIGINT|failed between .*: KeyboardInterrupt"
MISTAKE = r"ValueError: my own mistake"
CASES = {
    "layer": (
        fails(partial(Fails, ValueError, 0)),
        rf"Rank \d failed in the forward of stage 0 \(.*net\.0.*\), microbatch 0: {MISTAKE}",
    ),
    "memory": (
        fails(partial(Fails, torch.OutOfMemoryError, 0)),
        r"Rank \d failed in the forward of stage 0 .*OutOfMemoryError: my own mistake",
    ),
    "memory of the host": (fails(partial(Fails, MemoryError, 0)), r"Rank \d failed .*MemoryError"),
    "hook": (fails(Perceptron, Happens(1, mistake)), rf"Rank 1 failed between .*: {MISTAKE}"),
    "worker": (
        fails(Perceptron, script=Reads),
        rf"Rank 1 failed between .*DataLoader worker process 0.*{MISTAKE}",
    ),
    "SIGKILL": (
        fails(Perceptron, Happens(1, partial(send, signal.SIGKILL))),
        r"Rank 1 \(process \d+ on .*\) is gone without a word",
    ),
    "SIGINT": (fails(Perceptron, Happens(1, partial(send, signal.SIGINT))), INTERRUPTED),
}


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rank_0_tells_of_the_failure_of_another(case, layout):
    script, told = CASES[case]
    text = ended(script, *layout)
    own = re.split(r"\nrank \d+: ", text)[1]
    assert re.search("rank 0: Traceback", text) and re.search(told, own, re.DOTALL), text
    if "SIG" not in case:
        assert "in fail\n" in own or "in mistake\n" in own or "in __getitem__\n" in own


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["loss", "hook", "saving", "SIGKILL", "SIGINT"])
def test_a_failure_of_rank_0_ends_all(kind, layout):
    script, told = {
        "loss": (fails(FailsInLoss), rf"Rank 0 failed in the forward of stage 1 .*: {MISTAKE}"),
        "hook": (fails(Perceptron, Happens(0, mistake)), rf"Rank 0 failed between .*: {MISTAKE}"),
        "saving": (fails(Perceptron, Saves(0, save)), r"Rank 0 failed .*mistake\(\)"),
        "SIGKILL": (
            fails(Perceptron, Happens(0, partial(send, signal.SIGKILL))),
            r"Rank 0 .*is gone without a word",
        ),
        "SIGINT": (fails(Perceptron, Happens(0, partial(send, signal.SIGINT))), INTERRUPTED),
    }[kind]
    text = ended(script, *layout)
    assert re.search(told, text, re.DOTALL), text


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_of_one_rank_stops_all_behind_a_batch(rank, layout, capfd):
    text = ended(fails(Perceptron, Happens(rank, partial(send, signal.SIGTERM))), *layout)
    assert text.count("SIGTERMException") >= layout[0] * layout[1], text
    assert "lost its connection" not in text
    told = rf"^Rank {rank} \(process \d+\) was sent SIGTERM\. All ranks end\.$"
    assert len(re.findall(told, capfd.readouterr().err, re.MULTILINE)) == 1


class Patient(Impatient):
    """One that gives a run that was asked to end the time of a user's."""

    def __call__(self, strategy, devices):
        self.setup = lambda module: setattr(watch, "ASKED", 20.0)
        return super().__call__(strategy, devices)


class TakesLong(Perceptron):
    """A layer that needs longer than a rank that has failed is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_pre_hook(self.wait)

    def wait(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            time.sleep(3)


def send_soon(trainer: L.Trainer) -> None:
    threading.Timer(0.3, send, (signal.SIGTERM, trainer)).start()


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_waits_for_a_long_step(rank):
    script = fails(TakesLong, Happens(rank, send_soon), script=Patient)
    text = ended(script, schedule="GPipe", num_microbatches=1)
    assert text.count("SIGTERMException") >= 2 and "lost its connection" not in text, text


class SavesSlowly(L.Callback):
    """All ranks save, and one is asked to end meanwhile; rank 0 writes for a long time."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx != 1:
            return
        io = trainer.strategy.checkpoint_io
        save = io.save_checkpoint

        def slowly(*args: Any, **kwargs: Any) -> None:
            time.sleep(3)
            save(*args, **kwargs)

        io.save_checkpoint = slowly
        if trainer.global_rank == 1:
            send_soon(trainer)
        trainer.save_checkpoint(self.path)


def test_sigterm_waits_for_a_checkpoint(tmp_path):
    path = tmp_path / "saved.ckpt"
    text = ended(fails(Perceptron, SavesSlowly(str(path))))
    assert text.count("SIGTERMException") >= 2 and "is ended" not in text, text
    assert torch.load(path, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize(
    "words", ["no label server: connection refused", "DataLoader timed out after 5 seconds"]
)
def test_words_of_the_user_are_not_taken_for_those_of_groups(words):
    def complain(trainer: L.Trainer) -> None:
        raise RuntimeError(words)

    text = ended(fails(Perceptron, Happens(1, complain)))
    assert re.search(rf"Rank 1 failed between .*: RuntimeError: {words}", text)
    assert "in complain\n" in text and "PipelineStrategy(timeout=" not in text


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_sits_still_is_ended(failing_rank, capfd):
    """It is in the user's code, where no exception reaches it."""
    other = 1 - failing_rank
    script = fails(Perceptron, Happens(failing_rank, mistake), Happens(other, sleep))
    text = ended(script)
    assert "exit codes by rank: [1, 1]" in text and MISTAKE in text
    said = capfd.readouterr().err
    assert f"[rank {other}] is ended" in said and re.search(r"in sleep\n", said)
    assert re.search(rf"Rank {failing_rank} failed between .*{MISTAKE}", said)


class Sleeps(Fails):
    """The ranks that hold the first stage sit still in it."""

    def fail(self, *args: Any) -> None:
        if self.trainer.fit_loop.total_batch_idx == 1 and self.trainer.global_step:
            time.sleep(100)


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_a_rank_that_waits_too_long_says_for_what(layout, capfd):
    script = fails(partial(Sleeps, ValueError, 0))
    text = ended(script, *layout, timeout=timedelta(seconds=2))
    told = (
        r"Rank [01] was waiting for the values of microbatch 0 for stage 1 \(net.*\) "
        "from rank [1-3], for longer than timeout=0:00:02 of the strategy"
    )
    assert re.search(told, text, re.DOTALL), text
    said = capfd.readouterr().err
    assert f"[rank {layout[1]}] is ended" in said and re.search(r"in fail\n", said)


class Asleep(Happens):
    """One rank sits still; the other one is sent a signal while it waits for it."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank != self.rank:
            threading.Timer(0.5, self.what, (trainer,)).start()
        elif batch_idx == 1:
            time.sleep(100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_in_a_collective_reacts_to_signals(number):
    text = ended(fails(Perceptron, Asleep(1, partial(send, number))))
    assert "-9" not in text.partition("\n")[0]


class InTurn(Impatient):
    """Two runs in the same processes, of which the second fails."""

    def __call__(self, strategy, devices):
        callbacks, self.trainer["callbacks"] = self.trainer["callbacks"], []
        super().__call__(strategy, devices)
        self.trainer["callbacks"] = callbacks
        return super().__call__(strategy, devices)


def test_a_later_run_is_watched_too():
    text = ended(fails(Perceptron, Happens(1, mistake), script=InTurn))
    assert re.search(rf"Rank 1 failed between .*: {MISTAKE}", text)


class Leaves(Impatient):
    """A process that ends behind its run while the other one goes on."""

    def __call__(self, strategy, devices):
        super().__call__(strategy, devices)
        if os.environ["RANK"] == "0":
            time.sleep(3)
        return len(watch._watches[0]._failures())


def test_a_rank_that_has_ended_its_run_may_leave():
    assert fails(script=Leaves).pipelined(2) == [0, 0]


def rests(trainer: L.Trainer, module: L.LightningModule) -> float:
    begun = time.process_time()
    time.sleep(1)
    return time.process_time() - begun


def test_a_run_that_is_over_takes_no_time():
    script = fails()
    script.after = rests
    assert max(run.extra for run in script.pipelined(2)) < 0.2


def alive_behind(error: type[BaseException] | None) -> list[bool]:
    """Whether the module, the Trainer and a local of what failed are there behind a run."""
    torch.set_default_dtype(torch.float64)
    found: list[Any] = []

    class Large:
        pass

    def fail(trainer: L.Trainer) -> None:
        large = Large()
        found.append(weakref.ref(large))
        if error is not None:
            raise error

    module = Perceptron()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="pipeline",
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Happens(0, fail), Happens(1, fail)],
    )
    with contextlib.suppress(ValueError):
        trainer.fit(module, DataLoader(vectors(64)[0], 16))
    found += [weakref.ref(module), weakref.ref(trainer)]
    del module, trainer
    gc.unfreeze()  # a forked process has what was there before put aside
    gc.collect()
    return [each() is not None for each in found]


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_of_a_run_stays_in_memory(error):
    assert run_ranks(2, alive_behind, error) == [[False] * 3] * 2


def test_a_forked_process_has_no_part_in_the_watch():
    """A worker would keep the connection of a rank that was killed."""

    def look(trainer: L.Trainer) -> None:
        [own] = watch._watches
        number = own._lines[0].connection.fileno()
        child = os.fork()
        if not child:
            os._exit(len(watch._watches) + os.path.exists(f"/proc/self/fd/{number}"))
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("it has")

    assert len(fails(Perceptron, Happens(1, look)).pipelined(2)) == 2


class FailsAtTheEnd(Perceptron):
    """One rank fails when all others have been through with everything for some time."""

    def __init__(self, fail: Callable[[L.Trainer], Any]) -> None:
        super().__init__()
        self.fail = fail

    def teardown(self, stage):
        if self.trainer.global_rank == 1:
            time.sleep(1)
            self.fail(self.trainer)


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (mistake, rf"Rank 1 failed .*{MISTAKE}"),
        (partial(send, signal.SIGKILL), "Rank 1 .* is gone"),
    ],
    ids=["error", "SIGKILL"],
)
def test_rank_0_waits_for_the_ends_of_others(fail, told, layout):
    text = ended(fails(partial(FailsAtTheEnd, fail)), *layout)
    own = re.split(r"\nrank \d+: ", text)[1]
    assert re.search(told, own, re.DOTALL), text


class SignalledLate(L.Callback):
    """One rank is sent SIGTERM when there is nothing left to stop."""

    def on_train_end(self, trainer, module):
        if trainer.global_rank == 1:
            send(signal.SIGTERM, trainer)


def test_a_signal_in_the_end_of_a_run_is_no_failure():
    assert len(fails(Perceptron, SignalledLate()).pipelined(2)) == 2


ALONE = "error in a hook of rank 1, rank 0 is in a sleep"
LAUNCHED = {
    "error in a layer of rank 1": "Rank 1 failed in the forward of stage 0",
    "SIGKILL of rank 1": "Rank 1 .*is gone without",
    "SIGKILL of rank 0": "Rank 0 .*is gone without",
    ALONE: "rank 0. is ended, 7 s after .*\nRank 1 failed between",
}
"""Faults of `benchmarks/faults`, and what is said, with the limits that users have."""


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["popen", "spawn", "torchrun"])
@pytest.mark.parametrize("fault", LAUNCHED)
def test_launchers(fault, launcher):
    end = run(*FAULTS[fault], launcher)
    # Locks of Python's processes are those of other programs, too.
    left = [name for name in end.left if not name.startswith("sem.mp-")]
    assert end.seconds < 10 and end.code and not left
    said = LAUNCHED[fault]
    if launcher == "spawn":  # it sees the first process end, and ends the others
        said += "|process . terminated with signal SIGKILL"
    if fault == ALONE and launcher != "popen":  # these send SIGTERM when the first has ended
        said += "|Rank 1 failed between"
    assert re.search(said, end.output), end.output
    if (fault, launcher) == ("error in a layer of rank 1", "torchrun"):
        report = end.output.partition("Root Cause")[2]
        assert "rank      : 1" in report and "ValueError: a layer fails" in report
    assert "is not attached to a `Trainer`" not in end.output
