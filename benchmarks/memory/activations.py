"""Peak memory of a training step on each rank, over what the schedule needs.

    python benchmarks/memory/activations.py [--ranks 4] [--microbatches 8]

The model is a chain of equal blocks. What one of them saves for its backward is counted on one
device; times the blocks of a stage, times the most microbatches that the schedule's order keeps at
once, that is the theory. With recomputation a microbatch keeps what its stage gets, and one stage
has its activations while it runs backward. Measured is the peak of what torch's allocator gave out
during the third step, above what there was at its start (gradients are part of it).
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.actions import action_lists
from lightning_pipeline.bench.memory import AllocatedPeak
from lightning_pipeline.schedules import SCHEDULES, get_schedule
from lightning_pipeline.simulate import StageTime, simulate

WIDTH, ROWS, BLOCKS_PER_RANK = 64, 1024, 4


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, width]."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Chain(L.LightningModule):
    """Equal blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(num_blocks)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def saved_bytes() -> int:
    """What one block keeps of one microbatch for its backward, without its weights."""
    block, x = Block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in weights)


def rank_main(rank: int, folder: str, ranks: int, schedule: str, again: str, count: int) -> None:
    """Trains three steps on one rank and leaves its peak in a file."""
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in sizes.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="memory", GROUP_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    blocks = BLOCKS_PER_RANK * ranks
    stages = ranks * get_schedule(schedule).default_stages_per_rank
    each = blocks // stages
    module, peak = Chain(blocks), AllocatedPeak()
    strategy = PipelineStrategy(
        schedule=schedule,
        num_microbatches=count,
        partition=[f"net.{index}" for index in range(each, blocks, each)],
        activation_checkpointing=again,  # type: ignore[arg-type]
    )
    strategy._show = lambda plan: None  # type: ignore[method-assign]
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=3,
        max_epochs=1,
        callbacks=[peak],
        **off,
    )
    rows = torch.randn(3 * ROWS * count, WIDTH)
    trainer.fit(module, DataLoader(TensorDataset(rows), ROWS * count))
    Path(folder, str(rank)).write_text(str(peak.bytes))


def theory(schedule: str, ranks: int, count: int, again: bool) -> list[float]:
    """Bytes that each rank of the pipeline needs at once."""
    v = get_schedule(schedule).default_stages_per_rank
    lists = action_lists(get_schedule(schedule), ranks, v, count)
    peaks = simulate(lists, [StageTime(1, 1, 1)] * ranks * v).peak_activations
    stage = saved_bytes() * BLOCKS_PER_RANK / v
    received = ROWS * WIDTH * 4
    return [number * received + stage if again else number * stage for number in peaks]


def main() -> None:
    """Prints a row for each schedule, without and with recomputation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    asked = parser.parse_args()
    print("| schedule | recomputed | MB of each stage rank | over theory |\n|---|---|---|---|")
    for schedule in SCHEDULES:
        for again in ("none", "full"):
            with tempfile.TemporaryDirectory() as folder:
                arguments = (folder, asked.ranks, schedule.name, again, asked.microbatches)
                mp.start_processes(rank_main, arguments, asked.ranks, start_method="fork")  # type: ignore[no-untyped-call]
                found = [int(Path(folder, str(r)).read_text()) for r in range(asked.ranks)]
            found.reverse()  # the last stage is on global rank 0
            if schedule.placement == "v":
                found.reverse()
            needed = theory(schedule.name, asked.ranks, asked.microbatches, again == "full")
            sizes = ", ".join(f"{bytes_ / 1e6:.1f}" for bytes_ in found)
            over = ", ".join(f"{a / b:.2f}" for a, b in zip(found, needed, strict=True))
            print(f"| {schedule.name} | {again} | {sizes} | {over} |", flush=True)


if __name__ == "__main__":
    main()
