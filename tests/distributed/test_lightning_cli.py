"""LightningCLI builds the strategy from its name, or from a class path with arguments."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import vectors
from tests.models.modules import Perceptron


class Sized(Perceptron):
    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__(width, depth)


class Vectors(L.LightningDataModule):
    def __init__(self, rows: int = 48) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        return DataLoader(vectors(self.rows)[0], 16)


CONFIG = """
trainer:
  strategy:
    class_path: lightning_pipeline.PipelineStrategy
    init_args:
      pipeline_parallel_size: 2
      schedule: interleaved_1f1b
      num_microbatches: 4
"""


def ran(folder, devices, arguments):
    torch.set_default_dtype(torch.float64)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = [f"--trainer.{name}=false" for name in quiet]
    settings += [f"--trainer.default_root_dir={folder}", f"--trainer.devices={devices}"]
    settings += ["--trainer.accelerator=cpu", "--trainer.max_steps=3", "--seed_everything=3"]
    settings += ["--model.depth=6", "--optimizer=Adam", "--optimizer.lr=0.01"]
    cli = LightningCLI(Sized, Vectors, args=["fit", *settings, *arguments])
    return cli.model.state_dict(), getattr(cli.trainer.strategy, "plan", None)


@pytest.mark.parametrize(
    ("form", "schedule"),
    [("name", "1F1B"), ("registered", "ZBVZeroBubble"), ("class path", "Interleaved1F1B")],
)
def test_command_line_equals_one_device(tmp_path, form, schedule):
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    arguments = {
        "name": ["--trainer.strategy=pipeline"],
        "registered": ["--trainer.strategy=pipeline_zbv_zero_bubble"],
        "class path": [f"--config={tmp_path / 'pipeline.yaml'}"],
    }
    [(expected, _)] = run_ranks(1, ran, tmp_path / "one", 1, [])
    for state, plan in run_ranks(2, ran, tmp_path / "two", 2, arguments[form]):
        assert plan.schedule == schedule
        assert (tmp_path / "two" / "config.yaml").exists()
        torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-14)
