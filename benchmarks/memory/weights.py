"""Memory of a model that is built in ``configure_model``, on each rank of a pipeline.

    python benchmarks/memory/weights.py --gigabytes 2 --ranks 2
    python benchmarks/memory/weights.py --gigabytes 2 --ranks 4 --source safetensors

Prints, for each rank, its share of the weights, the peak of its resident anonymous memory
(``RssAnon`` of /proc/self/status, sampled) over what it had before the Trainer began, and their
ratio: while the model is built, placed and validated, and while it trains by plain SGD, which
needs as much again for gradients. The last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy

BLOCKS, ROWS, PERIOD = 16, 8, 0.002


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Large(L.LightningModule):
    """Blocks that weigh ``num_bytes`` in all."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.width, self.net = round((num_bytes / BLOCKS / 4 / 8) ** 0.5), None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(Block(self.width) for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Peak:
    """Highest resident anonymous memory within the block, in bytes over its beginning."""

    def __init__(self, base: int | None = None) -> None:
        self.base = base

    def __enter__(self) -> Peak:
        self.base = resident() if self.base is None else self.base
        self.bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.is_set():
            self.bytes = max(self.bytes, resident() - self.base)
            time.sleep(PERIOD)

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, resident() - self.base)


def resident() -> int:
    """Resident anonymous memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux 4.5 or later")


def save_weights(num_bytes: int, source: str, folder: Path) -> Path | None:
    """The file that the model starts from, if any."""
    if source == "built":
        return None
    module = Large(num_bytes)
    module.configure_model()
    path = folder / f"weights.{source}"
    if source == "safetensors":
        from safetensors.torch import save_file

        save_file(dict(module.state_dict()), path)
    else:
        torch.save({"state_dict": module.state_dict()}, path)
    return path


def measure(num_bytes: int, weights: Path | None, ranks: int) -> dict[str, float]:
    """Validates and trains on this rank; its share and peaks, in bytes."""
    data = DataLoader(torch.randn(2 * ROWS, Large(num_bytes).width), ROWS)
    warm = nn.Linear(64, 64)(torch.zeros(8, 64)).sum()  # what torch itself keeps
    warm.backward()
    strategy = PipelineStrategy(weights=weights, gather_after_run=False, num_microbatches=ranks)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        **dict.fromkeys(names, False),
    )
    module = Large(num_bytes)
    with Peak() as placed:
        trainer.validate(module, data, verbose=False)
    share = sum(t.numel() * t.element_size() for t in module.parameters() if not t.is_meta)
    with Peak(placed.base) as trained:
        trainer.fit(module, data)
    return {"share": share, "placed": placed.bytes, "trained": trained.bytes}


def run_rank(rank: int, ranks: int, folder: Path, num_bytes: int, weights: Path | None) -> None:
    """One process of the pipeline."""
    os.environ.update(
        TORCHELASTIC_RUN_ID="weights",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    found = measure(num_bytes, weights, ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


def run(num_bytes: int, ranks: int, source: str = "built") -> list[dict[str, float]]:
    """Share and peaks of each rank, in bytes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own, whose memory the ranks then do not begin with.
        writer = context.Process(target=save_weights, args=(num_bytes, source, folder))
        writer.start()
        writer.join()
        weights = None if source == "built" else folder / f"weights.{source}"
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, folder, num_bytes, weights))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--source", choices=["built", "safetensors", "ckpt"], default="built")
    asked = parser.parse_args()
    found = run(int(asked.gigabytes * 1e9), asked.ranks, asked.source)
    print(
        "| rank | share | peak, placed | ratio | peak, trained | ratio |\n|---|---|---|---|---|---|"
    )
    for rank, row in enumerate(found):
        share, placed, trained = row["share"], row["placed"], row["trained"]
        print(
            f"| {rank} | {share / 1e6:.0f} MB | {placed / 1e6:.0f} MB | {placed / share:.3f} | "
            f"{trained / 1e6:.0f} MB | {trained / share:.3f} |"
        )
    print(json.dumps({**vars(asked), "bytes": found}))


if __name__ == "__main__":
    main()
