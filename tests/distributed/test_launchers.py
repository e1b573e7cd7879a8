"""The ways to start ranks: Lightning's launchers, torchrun, and the command line."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.launcher

SCRIPT = """
import sys
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import lightning_pipeline
from tests.distributed.fits import rows
from tests.models.modules import Perceptron

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module = Perceptron()
    data = DataLoader(TensorDataset(rows(64, 6), rows(64, 3, seed=9)), 16)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(sys.argv[2]), strategy=sys.argv[1], max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        print("sum", sum(p.double().sum().item() for p in module.parameters()).hex())
        print("loss", float(trainer.callback_metrics["train_loss"]).hex())
"""


def run(command: list[str], folder: Path, deadline: float = 100) -> str:
    """Standard output of a command; all it started ends with it, or at the deadline."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert process.returncode == 0, f"{out}\n{error}"
    return out


def numbers(out: str) -> list[float]:
    return [float.fromhex(word) for word in re.findall(r"(?:sum|loss) (\S+)", out)]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def expected(script):
    return numbers(run([sys.executable, str(script), "auto", "1"], script.parent))


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline_fork",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("pipeline", "pipeline_spawn", "pipeline_zbv_zero_bubble")
        ),
    ],
)
def test_lightnings_launchers(script, expected, strategy):
    out = run([sys.executable, str(script), strategy, "2"], script.parent)
    assert numbers(out) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_torchrun(script, expected):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = run([*launch, str(script), "pipeline", "2"], script.parent)
    assert numbers(out) == pytest.approx(expected, rel=1e-12)


def validated_alone(checkpoint: Path) -> float:
    import lightning as L
    from lightning_pipeline.examples.data import DigitsDataModule
    from lightning_pipeline.examples.images import ResNet

    module = ResNet.load_from_checkpoint(checkpoint)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    [metrics] = trainer.validate(module, DigitsDataModule(), verbose=False)
    return metrics["val_acc"]


@pytest.mark.slow
def test_command_line_sweep_and_its_checkpoints(tmp_path):
    """Every job prints its accuracy; plain Lightning reads the checkpoint and agrees with it."""
    words = ["-m", "lightning_pipeline", "train", "--multirun", "trainer.max_epochs=1"]
    schedules = ["schedule=1f1b,interleaved_zero_bubble"]
    out = run([sys.executable, *words, *schedules], tmp_path)
    accuracies = [float(word) for word in re.findall(r"final validation accuracy: (\S+)", out)]
    assert len(accuracies) == 2
    assert out.count("InterleavedZeroBubble: 4 stages on 2 ranks") == 1
    jobs = sorted(tmp_path.glob("outputs/*/*/*/job.yaml"))
    for job, printed in zip(jobs, accuracies, strict=True):
        [table] = job.parent.rglob("metrics.csv")
        with table.open() as lines:
            [logged] = [float(row["val_acc"]) for row in csv.DictReader(lines) if row["val_acc"]]
        assert logged == pytest.approx(printed, abs=5e-5)
        [alone] = run_ranks(1, validated_alone, job.parent / "checkpoints" / "last.ckpt")
        assert alone == pytest.approx(logged, abs=1e-6)


def test_command_line_refuses_what_does_not_fit(tmp_path):
    words = ["-m", "lightning_pipeline", "train", "stages=3", "devices=2"]
    process = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2
    assert "stages" in process.stderr and "Traceback" not in process.stderr
