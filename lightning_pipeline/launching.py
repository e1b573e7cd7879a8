"""Lightning's launchers, which leave nobody behind."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGKILL
from typing import Any, Protocol

import lightning.pytorch as pl
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from typing_extensions import override

from lightning_pipeline.lightning_private import (
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExitException,
    forget_children,
    replace_requeue_handler,
    replace_sigterm_notifier,
)

_PATIENCE = 0.5
"""Seconds that processes have to say what they have to say."""


class Told(Protocol):
    """A strategy that is told of errors before anybody else."""

    def start(self) -> None:
        """Takes note that a run begins."""

    def told(self, error: BaseException) -> BaseException:
        """Takes note of an error that ends the run on this rank; returns what to raise."""

    def finish(self) -> None:
        """Takes note that this rank has done all of the run."""

    def through(self) -> None:
        """Takes note that this rank is through with the run, in whatever way."""


@dataclass
class Telling:
    """Runs a Trainer's function on a rank.

    Attributes:
        function: The function.
        strategy: Whom to tell of its errors.
    """

    function: Callable[..., Any]
    strategy: Told

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        try:
            self.strategy.start()
            result = self.function(*args, **kwargs)
            self.strategy.finish()
        except TunerExitException:
            self.strategy.through()
            raise
        except BaseException as error:
            other = self.strategy.told(error)
            try:
                if other is error:
                    raise
                raise other from other.__cause__
            except BaseException as raised:
                with contextlib.suppress(Exception):  # into torchrun's own report, if it is there
                    get_error_handler().record_exception(raised)
                raise
        return result


class ScriptLauncher(SubprocessScriptLauncher):
    """A launcher of the same script, whose ranks tell each other of errors.

    Args:
        strategy: Whom to tell.
        args: As for Lightning's launcher.
    """

    def __init__(self, strategy: Told, *args: Any) -> None:
        super().__init__(*args)
        self._strategy = strategy

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(Telling(function, self._strategy), *args, trainer=trainer, **kwargs)

    def stop_observer(self) -> None:
        """Keeps Lightning's observer from killing this process as soon as a child has failed."""
        for thread in threading.enumerate():
            forget_children(thread)

    def end_children(self, patience: float = _PATIENCE) -> None:
        """Ends the children that do not end by themselves.

        Args:
            patience: Seconds in which they may.
        """
        self.stop_observer()
        end = time.monotonic() + patience
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self.kill(SIGKILL)


class ProcessLauncher(MultiProcessingLauncher):
    """A launcher of processes that run a function, and tell each other of errors."""

    @override
    def launch(
        self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        strategy: Any = self._strategy
        return super().launch(Telling(function, strategy), *args, trainer=trainer, **kwargs)


class Requeue:
    """A signal of SLURM that is answered before the next batch, by all ranks together.

    Attributes:
        number: The signal that has come; 0: none.
        save: Lightning's handler: saves a checkpoint and asks SLURM to begin the job anew.
    """

    number = 0
    save: Callable[..., None]

    def note(self, number: int, *args: Any) -> None:
        """Takes note of the signal."""
        self.number = number

    def answer(self, number: int) -> None:
        """Answers a signal that has come to rank 0."""
        self.number = 0
        self.save(number, None)


def hear_signals(trainer: pl.Trainer, sigterm: Callable[..., None], requeue: Requeue) -> None:
    """Lets others take SIGTERM and SLURM's signal; before the Trainer registers its own handlers.

    Lightning's talk to other ranks inside of the handler, which does not return while those are in
    a step. That of SIGTERM tells no other rank than its children.

    Args:
        trainer: The Trainer.
        sigterm: Takes SIGTERM from now on.
        requeue: Takes the signal that comes before the end of a job of SLURM.
    """
    replace_sigterm_notifier(trainer, sigterm)
    requeue.save = replace_requeue_handler(trainer, requeue.note)
