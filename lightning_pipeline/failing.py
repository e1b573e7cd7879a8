"""How a run on several ranks ends early: no rank waits for one that has failed."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_pipeline.axes import AxesStrategy
from lightning_pipeline.errors import PipelineError
from lightning_pipeline.launching import ProcessLauncher, Requeue, ScriptLauncher, hear_signals
from lightning_pipeline.lightning_private import keeps_link_to_last, trainer_of
from lightning_pipeline.lines import Word
from lightning_pipeline.mesh import control_device
from lightning_pipeline.plan import Plan
from lightning_pipeline.reporting import (
    cut,
    has_lost_peer,
    has_timed_out,
    kind_of,
    say_no_more_of,
    shorten,
    shortened,
)
from lightning_pipeline.splitting.torch_private import default_store
from lightning_pipeline.watch import LIMIT, Watch, connect, connected
from lightning_pipeline.whereabouts import Position, describe

PATIENCE = timedelta(seconds=4)
"""How long a rank that was interrupted waits for the others to be interrupted too."""

END_PATIENCE = timedelta(seconds=20)
"""How long a rank whose epoch ends early waits for the others to end it too: their loaders may need
some time to find out that they are at their end."""

_SIGTERM_CODE = 128 + 15
"""What a shell says of a process that SIGTERM has ended."""


class FailingStrategy(AxesStrategy):
    """An AxesStrategy that knows when its ranks have stopped working together.

    A step that fails on one rank leaves the others inside a collective. From then on this rank
    decides by itself, so that Lightning can go through its own end of the run and raise the error.
    """

    _failed = False
    _reported = False
    _saves = False
    _num_runs = 0  # of the process, whose store keeps what was voted
    _num_votes = 0
    _num_ends: list[int]

    _watch: Watch | None = None
    _lost: BaseException | None = None
    _hindrance: Word | None = None
    _asked = False
    _requeue = Requeue()
    plan: Plan | None = None

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        sizes = self.num_processes, self.num_nodes
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self, self.cluster_environment, *sizes)
        else:
            self._launcher = ProcessLauncher(self, start_method=self._start_method)

    def start(self) -> None:
        """A run begins in this process; ranks that have met before are watched from now on."""
        self._failed = self._reported = self._asked = False
        self._lost = self._hindrance = None
        self._num_votes, self._num_ends = 0, [0, 0]
        self._requeue = Requeue()
        self._watch = connected()
        if self._watch is not None:
            self._hindrance = self._watch.hindrance()
            self._put_under_watch()

    def _require_groups(self) -> None:
        """Refuses to go on in processes whose groups an earlier run has left unusable.

        Raises:
            PipelineError: If so; says what has happened.
        """
        if self._hindrance is None:
            return
        self._failed = True
        what = self._hindrance.text.partition("\n")[0] or f"Rank {self._hindrance.rank} failed."
        raise PipelineError(
            "A run needs all ranks of its process groups at the same place, but those of these "
            f"processes cannot be used any more, because of an earlier run:\n{what}\nNo Trainer "
            "can go on in these processes, also if that error was caught. Start the script anew, "
            "with the last checkpoint as ckpt_path of the fit."
        )

    def _begin(self) -> None:
        """All ranks of the run are there."""
        assert self.cluster_environment is not None
        if self._watch is None:
            names = [self.cluster_environment.main_address, socket.gethostname()]
            self._watch = connect(names)
            self._put_under_watch()
        if self.world_size > 1 and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            hear_signals(trainer, self._note_sigterm, self._requeue)

    def _put_under_watch(self) -> None:
        watch, launcher = self._watch, self._launcher
        if watch is None:
            FailingStrategy._num_runs += 1
            return
        # Counted by those who have met: another job in this process may have met other ranks.
        self._num_runs = watch.run_number + 1
        if isinstance(launcher, ScriptLauncher):
            watch.on_failure, watch.last_resort = launcher.stop_observer, launcher.end_children
        watch.moves, watch.on_sigterm = self._moves, self._note_sigterm
        watch.begin(self._num_runs)

    def _moves(self) -> float:
        """Changes with every activity of a pass, and all the time while a checkpoint is saved."""
        position = self._position
        count = 0 if position is None else position.count
        return count + (time.monotonic() if self._saves else 0.0)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """A time that a rank needs for a checkpoint, however long."""
        self._saves = True
        try:
            yield
        finally:
            self._saves = False

    @property
    def _is_broken(self) -> bool:
        return self._watch is not None and self._watch.is_broken

    def _end_children(self) -> None:
        """Ends the processes that this one has started; those that end in order have more time."""
        if isinstance(self._launcher, ScriptLauncher):
            in_order = self._watch is not None and self._watch.end_in_order
            self._launcher.end_children(*[LIMIT] if in_order else [])

    def _note_sigterm(self, *signal: Any) -> None:
        """A rank was sent SIGTERM, this one or another."""
        self._asked = True

    def must_stop(self) -> bool:
        """Whether all ranks stop before the next batch: rank 0 decides.

        Also whether they save first what a job of SLURM goes on from.
        """
        assert self.lightning_module is not None
        asked = self._asked or self.lightning_module.trainer.received_sigterm
        words = [int(asked), self._requeue.number]
        told = torch.tensor(words, device=control_device(None, self.root_device))
        dist.broadcast(told, 0)
        stops, signal = told.tolist()
        if signal:
            self._requeue.answer(signal)
        return bool(stops)

    def end_at(self, batch: int, alone: bool = False) -> bool:
        """Whether all ranks end an epoch early and behind the same batch, as this one does.

        Args:
            batch: Number of the batch.
            alone: Whether each pipeline asks for itself.
        """
        self._num_ends[alone] += 1
        ranks = self._ranks(alone)
        name = f"ends/{self._num_runs}/{ranks[0]}/{alone}/{self._num_ends[alone]}"
        return self._agree(name, ranks, str(batch), END_PATIENCE)

    @property
    def _position(self) -> Position | None:
        """What this rank does, once its engine is there."""
        return None

    def _place(self) -> str:
        """Where this rank is, in words."""
        position = self._position
        if self._mesh is None:
            return "before its stages were made"
        if position is None or position.count == 0:
            return "before its first pass"
        return describe(position.activity, self.mesh, self.plan)

    @contextmanager
    def _failing_together(self, what: str) -> Iterator[None]:
        """Notes a failure inside of a step, where ranks are at different places.

        A run that does not train, so has nothing to save, stops here if a rank was sent SIGTERM.

        Args:
            what: Name of the step.

        Raises:
            RuntimeError: In the place of StopIteration, as from a generator (PEP 479): a loop of
                Lightning would take it for the end of its loader, on this rank alone.
        """
        try:
            module = self.lightning_module
            fn = None if module is None else module.trainer.state.fn
            if self._asked and fn != TrainerFn.FITTING:
                raise SIGTERMException
            yield
            if self._is_broken:  # NCCL says nothing of it
                raise RuntimeError("what the step waited for was broken off")
        except StopIteration as error:
            self._failed = True
            # contextmanager takes one that has this cause itself for Python's own.
            cause = StopIteration(*error.args).with_traceback(error.__traceback__)
            raise RuntimeError(f"{what} raised StopIteration") from cause
        except BaseException:
            self._failed = True
            raise

    def told(self, error: BaseException) -> BaseException:
        """Notes an error that ends the run on this rank, and tells the others.

        It comes before callbacks hear of the error: none may wait for other ranks any more that
        are not on their way to the same end.

        Args:
            error: The error.

        Returns:
            What to raise: the error, or the other rank's if it is only a consequence.
        """
        if error is self._lost:
            return error
        if isinstance(error, SIGTERMException):
            error.code = _SIGTERM_CODE
            self._tell_of_sigterm()
        watch = self._watch
        broken = isinstance(error, RuntimeError) and self._is_broken and not self._hindrance
        if broken or has_lost_peer(error):
            self._failed, cause = True, None
            if watch is not None:
                watch.say("lost")
                cause = watch.cause()
            self._lost = PipelineError(self._consequence(cause))
            self._lost.__cause__ = error if cause is None else None
            return self._lost
        if dist.is_initialized() and has_timed_out(error):
            self._failed = True
            stall = PipelineError(self._stalled(str(error)))
            if watch is not None:
                watch.say("stall", str(stall))
            return stall
        head = f"Rank {self.global_rank} failed {self._place()}"
        if watch is not None:
            text = f"{head}: {kind_of(error)}\n{shortened(error)}"
            watch.say("error", text, self._moment())
        if isinstance(error, Exception) and hasattr(error, "add_note"):  # from Python 3.11 on
            with contextlib.suppress(Exception):  # a class of the user's may have its own
                error.add_note(f"{head}.")
        return error

    def _moment(self) -> str:
        """Equal on ranks that are at the same place outside of passes."""
        position = self._position
        if position is not None and position.activity is not None:
            return f"rank {self.global_rank}"
        trainer = trainer_of(self.lightning_module)
        if trainer is None:
            return ""
        return f"{trainer.global_step} {trainer.fit_loop.total_batch_idx}"

    def _tell_of_sigterm(self) -> None:
        """Says on rank 0 which rank was sent SIGTERM: the exception has no words."""
        cause = None if self._watch is None else self._watch.cause(0.5)
        if self.is_global_zero and cause is not None and cause.kind == "signal":
            print(f"{cause.text} All ranks end.", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """This rank has done all of the run; rank 0 has when the others have.

        Raises:
            PipelineError: On rank 0, if another rank fails in its end of the run.
        """
        cause = None if self._watch is None else self._watch.failure_at_the_end()
        if cause is not None:
            self._lost = PipelineError(self._consequence(cause))
            raise self._lost
        self.through()

    def through(self) -> None:
        """This rank is through with the run, in whatever way: nothing ends its process now."""
        if self._watch is not None:
            self._watch.end()

    def _consequence(self, cause: Word | None) -> str:
        own = f"Rank {self.global_rank} lost its connection to another rank"
        if cause is None:
            return f"{own}, which has failed or was ended. That rank's own error is in its output."
        return f"{own}, because of this:\n{cause.text}"

    def _stalled(self, text: str) -> str:
        place = self._place()
        what = place if place.startswith("waiting") else f"waiting for other ranks {place}"
        return (
            f"Rank {self.global_rank} was {what}, for longer than timeout={self._timeout} of the "
            f"strategy allows ({text}). Where each rank is stands in its output. If one is only "
            "slow, set a longer PipelineStrategy(timeout=timedelta(hours=1))."
        )

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._failed:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._failed else super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._failed else super().reduce_boolean_decision(decision, all)

    def _may_save(self, filepath: Any) -> bool:
        """Whether all ranks are here to put a checkpoint together.

        While a run is being interrupted the ranks find out whether all of them are, after the same
        step. If not, a warning says so and the error that interrupted the run stays what it is.

        Raises:
            PipelineError: If the run is over because a rank has failed.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._failed = self._failed or self._is_broken
        if trainer.state.status == TrainerStatus.INTERRUPTED and not self._reported:
            place = f"{trainer.global_step} {trainer.fit_loop.total_batch_idx}"
            self._failed = self._failed or not self._are_together(place)
        if not self._failed:
            return True
        text = (
            f"No checkpoint is written to {filepath}: a rank of the pipeline has failed, and "
            "the others' parts of the model cannot be had any more. Continue from the last "
            "checkpoint."
        )
        if self._reported:
            raise PipelineError(text)
        for callback in trainer.checkpoint_callbacks:
            # It takes the file for written, and would let "last" lead there (Lightning 2.6).
            keeps_link_to_last(callback, False)
        warnings.warn(text, stacklevel=2)  # on this rank, whichever it is
        return False

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self._failed:  # the one that should take its place was not written
            super().remove_checkpoint(filepath)

    def _end(self) -> None:
        """A run ends: callbacks get their own methods back.

        In a process that has only started others the module has no Trainer.
        """
        trainer = trainer_of(self.lightning_module)
        for callback in () if trainer is None else trainer.checkpoint_callbacks:
            keeps_link_to_last(callback, True)

    def _are_together(self, place: str) -> bool:
        """Whether every rank asks this within the patience, and at the same place.

        A collective would wait for ranks that do not come for as long as the group's timeout, so
        they meet in the store that the processes met by. The first to know decides for all.
        """
        if not dist.is_initialized():
            return False
        self._num_votes += 1
        name = f"save/{self._num_runs}/{self._num_votes}"
        return self._agree(name, range(self.world_size), place, PATIENCE)

    def _agree(self, name: str, ranks: Sequence[int], place: str, patience: timedelta) -> bool:
        """Whether all of ``ranks`` ask ``name`` within the patience, and at the same place."""
        store = dist.PrefixStore(name, default_store())
        names = [str(rank) for rank in ranks]
        try:
            store.set(str(self.global_rank), place)
            try:
                store.wait(names, patience)
                together = all(store.get(name) == place.encode() for name in names)
            except RuntimeError:
                together = False
            return bool(store.compare_set("together", "", str(together)) == b"True")
        except RuntimeError:  # the store went with its rank
            return False

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = self._reported = True
        shorten(exception)
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            return
        follows = exception is self._lost
        if self.is_global_zero and not follows:
            return  # it is shown at the end, by whoever has called the Trainer
        # At once: rank 0 or a launcher may end this process before it gets to say it at its end.
        text = "".join(traceback.format_exception(exception))
        text = text if follows else cut(text)
        if follows and not self.is_global_zero:  # which tells all of it
            text = str(exception).partition("\nTraceback")[0] + "\n"
        sys.stderr.write(f"\n[rank {self.global_rank}] failed:\n{text}")
        sys.stderr.flush()
        say_no_more_of(exception)
