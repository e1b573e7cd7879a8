"""Jobs that somebody else starts anew: torchrun after a rank was killed, SLURM before its limit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.faults.__main__ import kill

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS, EVERY, AT = 12, 2, 7
DEADLINE = 150.0
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_pipeline import PipelineStrategy
from tests.distributed.test_exactness import vectors
from tests.distributed.test_resume import BATCH, Drops, Remembers

folder, victim, checkpoint = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEPS, EVERY, AT = map(int, sys.argv[4:])


class Ends(L.Callback):
    '''Is killed, or waits for a signal, in the middle of the first run.'''

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            with open(folder / "begun", "a") as file:
                file.write(f"{trainer.global_step}\\n")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step != AT or (folder / "begun").read_text().count("\\n") > 1:
            return
        if trainer.global_rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpoint == "None" and trainer.is_global_zero:
            (folder / "waits").touch()
            while trainer.strategy._requeue.number == 0:
                time.sleep(0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    torch.set_default_dtype(torch.float64)
    saves = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=EVERY, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=PipelineStrategy(2, num_microbatches=2),
        max_steps=STEPS,
        callbacks=[Ends(), saves],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Drops(width=8, depth=3)
    data = Remembers(vectors(5 * BATCH)[0])
    trainer.fit(module, data, ckpt_path=None if checkpoint == "None" else checkpoint)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "end")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(command: list[str], folder: Path, name: str, **variables: object) -> subprocess.Popen:
    """A process with its output in a file."""
    environment = {
        **os.environ,
        "FAULTS_RUN": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **{key: str(value) for key, value in variables.items()},
    }
    with (folder / f"{name}.txt").open("w") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def codes(processes: list[subprocess.Popen], folder: Path) -> list[int]:
    """Exit codes; none is left behind at the deadline, nor what they have started."""
    end = time.monotonic() + DEADLINE
    try:
        return [process.wait(max(0.0, end - time.monotonic())) for process in processes]
    finally:
        kill(str(folder))


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))


def words(folder: Path, victim: int, checkpoint: str) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return ["script.py", str(folder), str(victim), checkpoint, *map(str, (STEPS, EVERY, AT))]


def torchrun(folder: Path, victim: int) -> list[int]:
    """Exit codes of two agents, each of a host of two ranks."""
    folder.mkdir()
    options = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    command = ["-m", "torch.distributed.run", *options, *words(folder, victim, "last")]
    return codes([start(command, folder, f"node{node}") for node in range(2)], folder)


def begun(folder: Path) -> list[int]:
    """The steps at which its runs have begun."""
    return [int(line) for line in (folder / "begun").read_text().split()]


def assert_same_end(folder: Path, other: Path) -> None:
    ends = [torch.load(each / "end", weights_only=True) for each in (folder, other)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job that nobody killed."""
    folder = tmp_path_factory.mktemp("whole") / "job"
    assert torchrun(folder, -1) == [0, 0], said(folder)
    assert begun(folder) == [0]
    return folder


@pytest.mark.parametrize("victim", [0, 3])
def test_torchrun_goes_on_by_itself(tmp_path, whole, victim):
    folder = tmp_path / "job"
    assert torchrun(folder, victim) == [0, 0], said(folder)
    assert begun(folder) == [0, AT - AT % EVERY], said(folder)
    assert_same_end(folder, whole)


def slurm(folder: Path) -> list[subprocess.Popen]:
    """The tasks of two nodes of two, as srun starts them."""
    port, command = free_port(), words(folder, -1, "None")
    (folder / "bin").mkdir(exist_ok=True)
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    scontrol.chmod(0o755)
    return [
        start(
            command,
            folder,
            f"task{task}",
            SLURM_JOB_ID=4711,
            SLURM_JOB_NAME="train",
            SLURM_NTASKS=4,
            SLURM_NTASKS_PER_NODE=2,
            SLURM_NNODES=2,
            SLURM_NODELIST="127.0.0.1",
            SLURM_PROCID=task,
            SLURM_LOCALID=task % 2,
            SLURM_NODEID=task // 2,
            MASTER_PORT=port,
            PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
        )
        for task in range(4)
    ]


def test_slurm_begins_a_job_anew_and_it_goes_on(tmp_path, whole):
    """SIGUSR1 comes to tasks inside of a step, which wait for rank 0, and to it in a hook."""
    tasks, end = slurm(tmp_path), time.monotonic() + DEADLINE
    while not (tmp_path / "waits").exists() and time.monotonic() < end:
        time.sleep(0.5)
    for task in reversed(tasks):
        task.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
    assert codes(tasks, tmp_path) == [0] * 4, said(tmp_path)
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert_same_end(tmp_path, whole)
    (tmp_path / "end").unlink()
    assert codes(slurm(tmp_path), tmp_path) == [0] * 4, said(tmp_path)
    assert begun(tmp_path) == [0, AT + 1]
    assert_same_end(tmp_path, whole)
