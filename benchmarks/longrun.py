"""Whether anything grows with the steps of a long run: memory, files, threads, recordings.

    python -m benchmarks.longrun [--steps 2000] [--cases "plain,other shapes"] [--write]

Each case trains a small model with BatchNorm, dropout, a metric, a logger and checkpoints on two
ranks by two replicas, with a validation every hundred steps. Every rank counts what it holds every
few steps; growth is the slope of the least-squares line over the second half of the run. With
`--write` the picture of all that is in the folder `--output` goes into `docs/longrun.svg` and the
table into `docs/memory.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib import rcParams
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.faults.__main__ import write
from lightning_pipeline import PipelineStrategy
from lightning_pipeline.bench.ranks import run_ranks
from lightning_pipeline.splitting.torch_private import default_store

ROOT = Path(__file__).parents[1]
WIDTH, ROWS, BATCHES, LENGTHS = 16, 16, 64, 10
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "other shapes": ({}, {}),
    "interleaved": ({"schedule": "Interleaved1F1B"}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 4}),
}
"""Arguments of the strategy and of the Trainer."""

Counts = dict[str, list[float]]
"""By name of what is counted, its values over the steps that are noted."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Batches of sequences, drawn anew in each epoch.

    Args:
        varied: Whether a batch has one of `LENGTHS` lengths, by chance.
    """

    def __init__(self, varied: bool) -> None:
        self._varied = varied

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """``x`` and ``y`` of shape [rows, length, width]."""
        length = 3 + int(torch.randint(LENGTHS, ())) if self._varied else 8
        x = torch.randn(ROWS, length, WIDTH)
        return x, x.roll(1, -1)


class Block(nn.Module):
    """A residual perceptron with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, length, width]."""
        y = self.down(self.drop(torch.relu(self.up(x))))
        return x + self.norm(y.transpose(1, 2)).transpose(1, 2)


class Model(L.LightningModule):
    """Blocks in a row, with what users log."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = nn.functional.mse_loss(out, batch[1])
        self.error(out, batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


@dataclass
class Holds(L.Callback):
    """Counts what this process holds, every few steps of the optimizer.

    Args:
        every: Number of steps.

    Attributes:
        counts: What was counted; ``"step"`` is the number of the step.
    """

    every: int
    counts: Counts = field(default_factory=dict)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step % self.every == 0 and self.counts.get("step", [0])[-1] != step:
            for name, value in {"step": step, **held(trainer)}.items():
                self.counts.setdefault(name, []).append(value)


def held(trainer: L.Trainer) -> dict[str, float]:
    """What this process holds now, in bytes and counts."""
    gc.collect()
    plans = trainer.strategy._pipeline._preparer.plans  # type: ignore[attr-defined]
    return {
        "memory": resident(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "recordings": sum(map(len, plans._cache._items.values())) + len(plans._in_a_row),
        "objects": len(gc.get_objects()),
        "store": default_store().num_keys(),
        "shared": Path("/proc/self/maps").read_text().count("/dev/shm"),
    }


def resident() -> int:
    """What this process has written and keeps in memory, in bytes, counted page by page."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return int(sizes["Anonymous"]) * 1024


def train(case: str, steps: int, every: int, rare: int, folder: str) -> Counts:
    """Trains on one rank and returns what it held."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    strategy, arguments = CASES[case]
    holds = Holds(every)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=PipelineStrategy(2, num_microbatches=4, **strategy),
        max_steps=steps,
        val_check_interval=rare,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        log_every_n_steps=10,
        logger=CSVLogger(folder),
        callbacks=[holds, ModelCheckpoint(folder, every_n_train_steps=rare, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    data = DataLoader(Rows(case == "other shapes"), None)
    trainer.fit(Model(), data, data)
    return holds.counts


def run(case: str, steps: int, every: int, deadline: float, rare: int = 100) -> list[Counts]:
    """What each rank of a case held.

    Args:
        case: One of `CASES`.
        steps: Number of steps of the optimizer.
        every: After how many of them to count.
        deadline: How long it may take, in seconds.
        rare: Number of batches from one validation to the next, and of steps from one checkpoint
            to the next.
    """
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(4, train, case, steps, every, rare, folder, deadline=deadline)


def growth(counts: Counts, name: str) -> float:
    """Growth of what is counted in each step: the slope over the second half of the run."""
    steps, values = np.array(counts["step"]), np.array(counts[name])
    late = steps >= steps[-1] / 2
    return float(np.polyfit(steps[late], values[late], 1)[0])


NAMES = {
    "memory": "memory, MB\nmore than at first",
    "objects": "Python objects\nmore than at first",
    "recordings": "recordings",
    "files": "open files",
    "threads": "threads",
}
"""What the picture shows, from top to bottom."""


def draw(found: Mapping[str, Sequence[Counts]], path: Path) -> None:
    """Draws what all ranks hold over the steps, a column a case."""
    rcParams.update({"svg.hashsalt": "longrun", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    rows: Any = figure.subplots(len(NAMES), len(found), squeeze=False, sharex="col", sharey="row")
    for column, (case, ranks) in enumerate(found.items()):
        for axes, name in zip(rows[:, column], NAMES, strict=True):
            for rank, counts in enumerate(ranks):
                axes.plot(counts["step"], _shown(counts, name), linewidth=1, label=f"rank {rank}")
            axes.grid(alpha=0.3)
        rows[0, column].set_title(case)
        rows[-1, column].set_xlabel("step")
    for axes, label in zip(rows[:, 0], NAMES.values(), strict=True):
        axes.set_ylabel(label)
        _, top = axes.get_ylim()
        if "first" not in label:
            axes.set_ylim(0, 1.3 * top)
    rows[0, 0].legend(loc="lower right", fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def _shown(counts: Counts, name: str) -> np.ndarray[Any, Any]:
    values = np.array(counts[name])
    if "first" in NAMES[name]:
        values = values - values[0]
    return values / 1e6 if name == "memory" else values


def table(found: Mapping[str, Sequence[Counts]]) -> str:
    """What there is at the end, and what it grows by, in Markdown."""
    lines = [
        "| case | steps | memory at the end, MB by rank | growth in a step, bytes by rank "
        "| recordings | files | threads | keys in the store |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, ranks in found.items():
        memory = ", ".join(f"{counts['memory'][-1] / 1e6:.0f}" for counts in ranks)
        grows = ", ".join(f"{growth(counts, 'memory'):.0f}" for counts in ranks)
        cells = [case, f"{ranks[0]['step'][-1]:.0f}", memory, grows]
        cells += [over_run(ranks[0], n) for n in ("recordings", "files", "threads", "store")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def over_run(counts: Counts, name: str) -> str:
    """A count in the middle of the run and at its end, or once if they are equal."""
    middle, end = counts[name][len(counts[name]) // 2], counts[name][-1]
    return f"{end:.0f}" if middle == end else f"{middle:.0f} to {end:.0f}"


def main() -> None:
    """Runs what was asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="into docs/memory.md")
    parser.add_argument("--output", type=Path, default=Path("outputs/longrun"))
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    for case in filter(None, asked.cases.split(",")):
        found = run(case, asked.steps, asked.every, deadline=0.5 * asked.steps + 60)
        (asked.output / f"{case}.json").write_text(json.dumps(found))
        print(table({case: found}), flush=True)
    files = {case: asked.output / f"{case}.json" for case in CASES}
    kept = {case: json.loads(file.read_text()) for case, file in files.items() if file.exists()}
    if asked.write:
        draw(kept, ROOT / "docs/longrun.svg")
        write(ROOT / "docs/memory.md", table(kept), "longrun")


if __name__ == "__main__":
    main()
