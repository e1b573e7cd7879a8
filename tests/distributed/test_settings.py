"""What the Trainer sets for the whole process holds where the steps run, on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.loops import utilities
from torch.utils.data import DataLoader

from tests.distributed.feeds import Several
from tests.distributed.fits import Script
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import vectors
from tests.distributed.test_flags import Steps
from tests.models.modules import Perceptron


class Settings(Steps):
    """Notes what is set where its steps run, on the ranks that run them."""

    noted: ClassVar[set] = set()

    def note(self, step):
        self.noted.add(
            (
                step,
                torch.is_inference_mode_enabled(),
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.backends.cudnn.benchmark,
            )
        )

    def training_step(self, batch, batch_idx):
        self.note("training")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.note("test")
        return super().test_step(batch, batch_idx)


SETTINGS = {
    "none": ({}, (True, False, False, False)),
    "inference_mode": ({"inference_mode": False}, (False, False, False, False)),
    "deterministic": ({"deterministic": True}, (True, True, False, False)),
    "deterministic, warn": ({"deterministic": "warn"}, (True, True, True, False)),
    "benchmark": ({"benchmark": True}, (True, False, False, True)),
}


def test_settings_hold_in_the_steps_of_every_rank():
    def make(flags):
        def setup(module):
            Settings.noted.clear()
            # Over gloo Lightning never enters the inference mode; over NCCL it does.
            utilities.dist = SimpleNamespace(get_backend=lambda: "nccl")
            torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(False)

        trainer = {"max_steps": 2, "limit_val_batches": 0, **flags}
        return Script(Settings, lambda: vectors(48), trainer=trainer, setup=setup, after=noted)

    def noted(trainer, module):
        trainer.test(module, DataLoader(vectors(8)[0], 4), verbose=False)
        return {*Settings.noted}

    compared = Several({name: make(flags) for name, (flags, _) in SETTINGS.items()}).compare()
    for name, (expected, runs) in compared.items():
        held = SETTINGS[name][1]
        assert expected.extra == {("training", False, *held[1:]), ("test", *held)}, name
        watched = ("test", False, *held[1:])  # the step is watched once outside inference mode
        assert [run.extra | {watched} for run in runs] == [expected.extra | {watched}] * 2, name


class Poisoned(Perceptron):
    """Has a loss, but no gradient."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (0 * loss).sqrt() if batch_idx == 1 else loss


def test_detect_anomaly_names_the_backward():
    trainer = {"detect_anomaly": True, "limit_val_batches": 0}
    with pytest.raises(RankFailed, match=r"Function '\w+Backward0' returned nan values"):
        Script(Poisoned, lambda: vectors(48), trainer=trainer).pipelined(2, deadline=30)
