"""Scripts with loaders of their own, and several of them in the same processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import timer
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop

from tests.distributed.fits import Run, Script, distance
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron


@dataclass
class Feeds(Script):
    """A script with loaders of its own.

    Attributes:
        data: What ``fit`` gets besides the module.
    """

    data: Callable[[], dict[str, Any]] = dict

    def __call__(self, strategy: Any, devices: int) -> Run:
        fit = L.Trainer.fit
        L.seed_everything(3, workers=True)
        L.Trainer.fit = lambda trainer, module, *_, **__: fit(trainer, module, **self.data())
        try:
            return super().__call__(strategy, devices)
        finally:
            L.Trainer.fit = fit


@dataclass
class Several:
    """Scripts that run one after the other in the same processes, which is cheaper."""

    scripts: dict[str, Script]

    def __call__(self, strategy: Any, devices: int) -> dict[str, Run]:
        runs = {}
        for name, script in self.scripts.items():
            try:
                runs[name] = script(strategy, devices)
            except BaseException as error:
                error.add_note(f"in the case {name!r}") if hasattr(error, "add_note") else None
                raise
        return runs

    def plain(self, replicas: int = 1) -> list[dict[str, Run]]:
        strategy = "auto" if replicas == 1 else "ddp_find_unused_parameters_true"
        return run_ranks(replicas, self, strategy, replicas)

    def pipelined(self, ranks: int, replicas: int = 1) -> list[dict[str, Run]]:
        world = ranks * replicas
        return run_ranks(world, self, {"pipeline_parallel_size": ranks}, world)

    def compare(self, ranks: int = 2, replicas: int = 1) -> dict[str, tuple[Run, list[Run]]]:
        """Asserts that all runs of all scripts are those of one device, or of DDP."""
        wanted, found = self.plain(replicas), self.pipelined(ranks, replicas)
        for name in self.scripts:
            for rank, run in enumerate(found):
                expected = wanted[rank % replicas][name]  # neighbours are replicas
                assert distance(run[name], expected) <= TOLERANCE, name
                assert run[name].metrics == pytest.approx(expected.metrics, rel=1e-12), name
        return {name: (wanted[0][name], [run[name] for run in found]) for name in self.scripts}


def feeds(data, model=Perceptron, **trainer):
    trainer = {"max_steps": -1, "max_epochs": 1, **trainer}
    return Feeds(model, partial(vectors, 8), data=data, trainer=trainer)


def own_clock(module: L.LightningModule) -> None:
    """Gives this rank a clock of its own: a second a step on rank 0, ten on the others."""
    speed = 1.0 if os.environ["RANK"] == "0" else 10.0
    clock = SimpleNamespace(**vars(time))
    clock.monotonic = lambda: module.trainer.global_step * speed
    for user in (timer, evaluation_loop, fit_loop, training_epoch_loop):
        user.time = clock
