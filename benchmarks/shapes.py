"""Cost of a step when batches have 20 lengths by turns, over steps of one length.

    python benchmarks/shapes.py [--schedule 1F1B] [--pairs 6]

A GPT of eight blocks on two ranks. Every length is seen once; then three kinds of rounds alternate,
100 steps each and all with as many tokens: *mixed*, the 20 lengths five times in a new order each
time; *runs*, each length five times in a row; *one*, all at the mean length. Mixed over runs is
what changing shapes costs, for both compute the same; mixed over one has in it what lengths that
suit the CPU's vectors less cost on one device, too. Ratios are taken round by round, of wall time
and of the ranks' CPU time, and their median is printed, next to what a new length costs when it is
first seen. A line of JSON ends the output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy

RANKS, ROWS, MICROBATCHES, WIDTH, BLOCKS, WORDS = 2, 8, 4, 128, 8, 512
MEAN, REPEATS = 64, 5
LENGTHS = range(MEAN - 38, MEAN + 39, 4)
KINDS = ("mixed", "runs", "one")


class Block(nn.Module):
    """A block of a transformer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, length, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Timed(L.LightningModule):
    """A GPT that notes when each of its steps begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * MEAN, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, WORDS)
        self.clocks: list[tuple[float, float]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.position(places)))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def on_train_batch_start(self, *_: Any) -> None:
        self.clocks.append((time.perf_counter(), time.process_time()))

    def on_train_batch_end(self, *_: Any) -> None:
        wall, cpu = self.clocks[-1]
        self.clocks[-1] = (time.perf_counter() - wall, time.process_time() - cpu)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def order_of_lengths(pairs: int) -> list[int]:
    """Length of every step: each once, the mean twice, then ``pairs`` rounds of each kind."""
    steps = [MEAN, MEAN, *LENGTHS]
    draw = random.Random(0)
    for _ in range(pairs):
        for _ in range(REPEATS):
            steps += draw.sample(LENGTHS, len(LENGTHS))
        steps += [length for length in LENGTHS for _ in range(REPEATS)]
        steps += [MEAN] * REPEATS * len(LENGTHS)
    return steps


def rank_main(rank: int, folder: str, schedule: str, pairs: int) -> None:
    """Trains on one rank and leaves its times in a file."""
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({key: str(value) for key, value in sizes.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="shapes", GROUP_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Timed()
    strategy = PipelineStrategy(schedule=schedule, num_microbatches=MICROBATCHES)
    strategy._show = lambda plan: None  # type: ignore[method-assign]
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **off)
    batches = [torch.randint(WORDS, (ROWS, length)) for length in order_of_lengths(pairs)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    Path(folder, str(rank)).write_text(json.dumps(module.clocks))


def main() -> None:
    """Prints the ratio and the cost of a new length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--pairs", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, asked.schedule, asked.pairs)
        mp.start_processes(rank_main, arguments, RANKS, start_method="fork")  # type: ignore[no-untyped-call]
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    found: dict[str, Any] = {"schedule": asked.schedule, "pairs": asked.pairs}
    for column, clock in enumerate(("wall", "cpu")):
        times = [sum(step[column] for step in steps) for steps in zip(*ranks, strict=True)]
        times = [t / RANKS for t in times] if clock == "wall" else times
        warm, count = 2 + len(LENGTHS), REPEATS * len(LENGTHS)
        rounds = [sum(times[i : i + count]) for i in range(warm, len(times), count)]
        mixed, runs, one = (rounds[i :: len(KINDS)] for i in range(len(KINDS)))
        step = statistics.median(runs) / count
        found[clock] = {
            "step_ms": 1e3 * step,
            "new_length_ms": 1e3 * (statistics.median(times[2:warm]) - step),
        }
        for kind, others in (("runs", runs), ("one", one)):
            ratios = sorted(a / b for a, b in zip(mixed, others, strict=True))
            found[clock][kind] = ratios
            print(
                f"{clock}: mixed over {kind} {statistics.median(ratios):.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )
        print(
            f"{clock}: step {1e3 * step:.1f} ms, a new length "
            f"{found[clock]['new_length_ms']:.0f} ms more"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
