"""PipelineTimeline: a callback that shows when every rank did what in a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_pipeline.activities import Mark, Phase, Recorder, make_recorder
from lightning_pipeline.clocks import Offset, offset_of_clock
from lightning_pipeline.draw import draw_svg
from lightning_pipeline.measured import MeasuredPipeline, MeasuredStep, RankRecord, measure
from lightning_pipeline.schedules import require_count
from lightning_pipeline.strategy import PipelineStrategy
from lightning_pipeline.trace import chrome_trace


class PipelineTimeline(Callback):
    """Records what every rank does in some steps, and sets it beside what the schedule predicts.

    A recorded step is logged (``pipeline/bubble`` and others, see ``docs/timeline.md``), kept in
    ``last``, and written as ``timeline-STEP.json`` for Perfetto and ``timeline-STEP.svg``. With
    accumulation it is the last of the batches, the one that the optimizer steps on.

    Example:
        >>> timeline = PipelineTimeline(steps=[10], every_n_steps=1000)
        >>> trainer = L.Trainer(devices=4, strategy="pipeline", callbacks=[timeline])

    Args:
        steps: Steps to record, as ``trainer.global_step`` counts them: the first one, in which the
            model is planned, is 0.
        every_n_steps: Further ones: the last of every so many.
        dirpath: Folder for the files; ``None``: ``trainer.log_dir``.

    Attributes:
        last: The step that was recorded last, the same on all ranks; ``None`` before the first.

    Raises:
        ValueError: If no step would be recorded.
    """

    def __init__(
        self,
        steps: Sequence[int] = (),
        every_n_steps: int | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        steps = tuple(steps)
        for step in steps:
            if not isinstance(step, int) or step < 0:
                raise ValueError(
                    "PipelineTimeline(steps=...) must list numbers of steps, 0 for the first, got "
                    f"{step!r}. Set e.g. steps=[10]."
                )
        if every_n_steps is not None:
            require_count("every_n_steps", every_n_steps)
        elif not steps:
            raise ValueError(
                "PipelineTimeline must have a step to record, got no steps and no every_n_steps. "
                "Set e.g. steps=[10] or every_n_steps=1000."
            )
        self._steps, self._every, self._dirpath = frozenset(steps), every_n_steps, dirpath
        self._recorder: Recorder | None = None
        self._step = 0
        self._offset: Offset | None = None
        self.last: MeasuredStep | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes sure that there is a pipeline.

        Raises:
            MisconfigurationException: If there is none, or another PipelineTimeline.
        """
        self._offset = None  # another run may have other ranks
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineStrategy):
            raise MisconfigurationException(
                "PipelineTimeline must go with strategy='pipeline' or a PipelineStrategy, got "
                f"{type(strategy).__name__} from Trainer(strategy=...), whose ranks have no stages "
                "to show. Set Trainer(strategy='pipeline'), or remove the callback from "
                "Trainer(callbacks=...)."
            )
        count = sum(isinstance(callback, PipelineTimeline) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if count > 1:
            raise MisconfigurationException(
                f"A Trainer takes one PipelineTimeline, got {count} in Trainer(callbacks=...). Set "
                "steps and every_n_steps of one."
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to record, if the step is to be."""
        self._step = trainer.global_step
        due = self._every is not None and (self._step + 1) % self._every == 0
        if due or self._step in self._steps:
            self._recorder = make_recorder(_strategy(trainer).root_device)
            _strategy(trainer).observe(self._recorder)
            self._recorder("else")

    def _tell(self, phase: Phase) -> None:
        if self._recorder is not None:
            self._recorder(phase)

    @override
    def on_before_backward(self, *args: Any) -> None:
        """The gradients are handed back and completed."""
        self._tell("exchange ends")

    @override
    def on_after_backward(self, *args: Any) -> None:
        """They are complete."""
        self._tell("else")

    @override
    def on_before_optimizer_step(self, *args: Any) -> None:
        """They are clipped, and the optimizer steps."""
        self._tell("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the recording and shows it, behind the optimizer's step."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        strategy = _strategy(trainer)
        strategy.observe(None)
        marks = recorder.stop()
        if trainer.global_step == self._step:  # more batches are accumulated
            return
        self._show(trainer, marks)

    def _show(self, trainer: Trainer, marks: list[Mark]) -> None:
        """Joins what all ranks have noted; every rank calls it."""
        mesh, device = _strategy(trainer).mesh, _strategy(trainer).root_device
        if self._offset is None:
            self._offset = offset_of_clock(mesh, device)
        place = mesh.global_rank, mesh.pipeline_rank, mesh.data_rank
        records: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(records, RankRecord(*place, self._offset, marks))
        self.last, pipelines = measure(self._step, records)
        for logger in trainer.loggers:
            logger.log_metrics(self.last.metrics, step=self._step)
        folder = self._dirpath or trainer.log_dir  # asks all ranks
        if trainer.is_global_zero:
            path = _write(Path(folder or "."), self.last, pipelines)
            rank_zero_info(f"PipelineTimeline: step {self._step} is in {path} and {path.stem}.svg.")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells of steps that did not come."""
        missed = sorted(step for step in self._steps if step >= trainer.global_step)
        if missed:
            rank_zero_warn(
                f"PipelineTimeline was to record the steps {missed}, but the training ended after "
                f"{trainer.global_step}. Set steps below that, 0 for the first."
            )


def _strategy(trainer: Trainer) -> PipelineStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    return strategy


def _write(folder: Path, step: MeasuredStep, pipelines: Sequence[MeasuredPipeline]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    trace = chrome_trace(step, pipelines)
    path = folder / f"timeline-{step.step}.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    rows = {"predicted": step.predicted, "measured": step.measured}
    took, promised = (1e3 * rows[name].makespan for name in ("measured", "predicted"))
    title = f"Step {step.step}: {took:.1f} ms measured, {promised:.1f} ms predicted"
    path.with_suffix(".svg").write_text(draw_svg(rows, title), encoding="utf-8")
    return path
