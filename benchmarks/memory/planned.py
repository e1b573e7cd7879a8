"""Growth of a training's memory on each rank against what the planner says before it.

    python benchmarks/memory/planned.py [--ranks 4]

Each rank trains three steps on the CPU, on gloo. Measured is the peak of its resident memory during
the third step over what was resident before it, when weights and the optimizer's state are there
and gradients are not: activations, gradients and what is in hand besides. Predicted is the sum of
these three parts of the plan.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning_pipeline.examples.text import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.bench.memory import (
    reset_resident_peak,
    resident,
    resident_peak,
    return_memory_at_once,
)
from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.planning.candidates import Candidate
from lightning_pipeline.planning.devices import local_device
from lightning_pipeline.planning.prediction import Prediction
from lightning_pipeline.schedules import get_schedule

MICROBATCHES, HOST = 8, torch.device("cpu")


class MLP(L.LightningModule):
    """Wide layers on rows of features."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(16)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    @staticmethod
    def data(count: int) -> TensorDataset:
        rows = torch.randn(count * 4096, 256)
        return TensorDataset(rows, rows)

    batch_size = 4096


class GPT(MLP):
    """A small decoder on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 128), *(Block(128, 4, 0.1) for _ in range(8)), nn.Linear(128, 256)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    @staticmethod
    def data(count: int) -> TensorDataset:
        tokens = torch.randint(0, 256, (count * 32, 128))
        return TensorDataset(tokens, tokens)

    batch_size = 32


class Resident(L.Callback):
    """Growth of the resident memory over the third step."""

    bytes = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """Begins anew."""
        if args[-1] == 2:
            reset_resident_peak()
            self._before = resident()

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        """Reads it before the optimizer makes tensors of its own."""
        if trainer.global_step == 2:
            self.bytes = resident_peak() - self._before


def rank_main(
    rank: int, folder: str, ranks: int, kind: type[MLP], schedule: str, again: str
) -> None:
    """Trains three steps on one rank and leaves the growth in a file."""
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in sizes.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="memory", GROUP_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "0"
    torch.set_num_threads(1)
    return_memory_at_once()
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = PipelineStrategy(
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        activation_checkpointing=again,  # type: ignore[arg-type]
    )
    strategy._show = lambda plan: None  # type: ignore[method-assign]
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    growth = Resident()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=3, callbacks=[growth], **off
    )
    trainer.fit(kind(), DataLoader(kind.data(3), kind.batch_size))
    position = strategy.mesh.pipeline_rank
    Path(folder, str(position)).write_text(str(growth.bytes))


def predicted(blueprint: Blueprint, ranks: int, kind: type[MLP], name: str, again: str) -> Any:
    """Bytes of activations, gradients and what is in hand on each rank."""
    schedule, device = get_schedule(name), local_device(HOST)
    depth = schedule.default_stages_per_rank
    candidate = Candidate(schedule, ranks, 1, depth, MICROBATCHES, again)  # type: ignore[arg-type]
    drawing, rates = blueprint.cut(ranks * depth), device.rates(torch.float32)
    found = Prediction(candidate, drawing, kind.batch_size, device, rates)
    return [m.activations + m.gradients + m.working for m in found.memory]


def main() -> None:
    """Prints a row for each model and schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    print("| model | schedule | recomputed | measured, MB | predicted, MB | ratio |")
    print("|---|---|---|---|---|---|")
    for kind in (MLP, GPT):
        torch.manual_seed(0)
        batch = next(iter(DataLoader(kind.data(1), kind.batch_size)))
        counts, stages = (MICROBATCHES, MICROBATCHES), 2 * ranks
        rates = local_device(HOST).cutting_rates
        size = kind.batch_size
        blueprint = Blueprint(kind(), batch, size, counts, stages, rates, {}, context=nullcontext)
        for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
            for again in ("none", "full"):
                with tempfile.TemporaryDirectory() as folder:
                    arguments = (folder, ranks, kind, name, again)
                    mp.start_processes(rank_main, arguments, ranks, start_method="fork")  # type: ignore[no-untyped-call]
                    found = [int(Path(folder, str(r)).read_text()) for r in range(ranks)]
                needed = predicted(blueprint, ranks, kind, name, again)
                cells = [
                    ", ".join(f"{x / 1e6:.1f}" for x in found),
                    ", ".join(f"{x / 1e6:.1f}" for x in needed),
                    ", ".join(f"{b / a:.2f}" for a, b in zip(found, needed, strict=True)),
                ]
                print("|", " | ".join([kind.__name__, name, again, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
