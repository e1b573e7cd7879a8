"""Subjects that train: a Trainer, step by step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline.bench.harness import now, sleep_until
from lightning_pipeline.strategy import PipelineStrategy

_NUM_BATCHES = 10**6  # a fit that never ends by itself
_OFF = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class TrainerSteps:
    """A subject: the steps of a ``Trainer.fit`` that goes on for as long as the process.

    The fit has a thread of its own, which waits where the Trainer asks for the next batch. So a
    step is all that a Trainer does from one batch to the next. The first step plans and places.

    Args:
        trainer: The Trainer.
        module: What it fits.
        batches: Its batches, used again and again.

    Attributes:
        module: What it fits.
        strategy: The Trainer's strategy.
    """

    strategy: Any

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, batches: Sequence[Any]
    ) -> None:
        self._gate = _Gate(batches)
        self.module, self.strategy = module, trainer.strategy
        self._error: BaseException | None = None
        args = trainer, module
        thread = threading.Thread(target=self._fit, args=args, daemon=True)
        thread.start()
        self._wait()

    def _fit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        torch.set_num_threads(1)  # a number of this thread's own
        try:
            trainer.fit(module, DataLoader(self._gate, batch_size=None))
            raise RuntimeError("The fit of a subject ended, because of the Trainer's limits.")
        except BaseException as error:
            self._error = error
            self._gate.idle.set()

    def run(self, start: float, num_steps: int) -> float:
        """Takes the steps in the fit's thread."""
        gate = self._gate
        gate.start, gate.remaining = start, num_steps
        gate.idle.clear()
        gate.go.set()
        self._wait()
        return gate.ended

    def _wait(self) -> None:
        self._gate.idle.wait()
        if self._error is not None:
            raise self._error


class _Gate(Dataset[Any]):
    """Batches that are given when their step may begin."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self.idle, self.go = threading.Event(), threading.Event()
        self.start, self.ended, self.remaining = 0.0, 0.0, 0

    def __len__(self) -> int:
        return _NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        self.ended = now()
        if self.remaining == 0:
            self.idle.set()
            self.go.wait()
            self.go.clear()
            sleep_until(self.start)
        self.remaining -= 1
        return self._batches[index % len(self._batches)]


class QuietStrategy(PipelineStrategy):
    """A PipelineStrategy that does not print its plan."""

    def _show(self, plan: Any) -> None:
        self.plan = plan


def trainer_steps(
    module: L.LightningModule,
    batches: Sequence[Any],
    *,
    ranks: int,
    strategy: dict[str, Any] | PipelineStrategy | str,
    **arguments: Any,
) -> TrainerSteps:
    """A quiet Trainer's steps.

    Args:
        module: What is fitted.
        batches: Its batches.
        ranks: Devices of the Trainer.
        strategy: Arguments of a PipelineStrategy, one, or the name of one of Lightning's.
        arguments: Further arguments of the Trainer.
    """
    chosen: Any = QuietStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=chosen,
        max_epochs=1,
        use_distributed_sampler=False,
        **{**_OFF, **arguments},
    )
    return TrainerSteps(trainer, module, batches)
