"""A training in which something goes wrong on one rank: the script that benchmarks.faults runs."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline import PipelineStrategy

AT = 3
"""The batch in which it happens."""


class Fault:
    """What goes wrong, once, on one rank.

    Args:
        kind: Its name.
        rank: Global rank.
        folder: Where the moment is noted.
    """

    def __init__(self, kind: str, rank: int, folder: Path) -> None:
        self.kind, self.rank, self.folder, self.batch = kind, rank, folder, 0

    def happens(self, place: str) -> bool:
        """Whether it happens here and now; notes the moment."""
        here = self.kind.split(":")[0] == place and self.batch == AT
        if here and int(os.environ.get("FAULT_RANK", -1)) == self.rank:
            (self.folder / "moment").write_text(str(time.time()))
            return True
        return False


class Block(nn.Linear):
    """A layer in whose forward a stage may fail."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(16, 16)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault.happens("forward"):
            raise ValueError("a layer fails")
        if self.fault.happens("memory"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")
        return super().forward(x).tanh()


class Model(L.LightningModule):
    """Layers in a row."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.net = nn.Sequential(*(Block(fault) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch)
        if self.fault.happens("loss"):
            raise ValueError("the loss fails")
        loss = F.mse_loss(out, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Happens(L.Callback):
    """Lets a fault happen in hooks."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_fit_start(self, trainer: L.Trainer, *args: Any) -> None:
        os.environ["FAULT_RANK"] = str(trainer.global_rank)  # for the workers of loaders too

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.fault.batch = trainer.fit_loop.total_batch_idx + 1

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.fault.happens("hook") or self.fault.happens("alone"):
            raise ValueError("a hook fails")
        if self.fault.happens("signal"):
            os.kill(os.getpid(), getattr(signal, self.fault.kind.split(":")[1]))
        others = trainer.global_rank != self.fault.rank and self.fault.kind == "alone"
        if self.fault.happens("stall") or (others and self.fault.batch == AT):
            time.sleep(1000)
        if self.fault.happens("save"):
            trainer.strategy.checkpoint_io.save_checkpoint = self.cannot_save
        if self.fault.batch == AT and self.fault.kind == "save":
            trainer.save_checkpoint(self.fault.folder / "saved.ckpt")
        if self.fault.batch == AT and self.fault.kind == "stuck":
            self.wait_for_a_peer(trainer)

    def cannot_save(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for a full disk."""
        raise OSError(28, "No space left on device")

    def wait_for_a_peer(self, trainer: L.Trainer) -> None:
        """One rank sits still; another that waits for it is sent SIGTERM."""
        if trainer.global_rank != self.fault.rank:
            time.sleep(1000)

        def terminate() -> None:
            self.fault.happens("stuck")
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Timer(1.0, terminate).start()


class Rows(Dataset[Tensor]):
    """Data that a worker of a loader may fail to read."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.num_read = fault, 0

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Tensor:
        if self.fault.kind == "worker":
            self.num_read += 1
            self.fault.batch = self.num_read // 16  # batches that this worker has read
            if self.fault.happens("worker"):
                raise ValueError("a row cannot be read")
        return torch.full((16,), index / len(self))


def main() -> None:
    """Trains until it fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--start", default="popen")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    fault = Fault(args.kind, args.rank, args.folder)
    timeout = timedelta(seconds=10 if args.kind == "stall" else 1800)
    strategy = PipelineStrategy(
        args.ranks, args.replicas, num_microbatches=4, start_method=args.start, timeout=timeout
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.ranks * args.replicas,
        strategy=strategy,
        max_epochs=1000,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Happens(fault)],
    )
    loader = DataLoader(Rows(fault), 16, num_workers=2 if args.kind == "worker" else 0)
    trainer.fit(Model(fault), loader)


if __name__ == "__main__":
    main()
