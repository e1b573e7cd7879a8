"""Training runs that tests compare: the same script on one device, on replicas, on a pipeline."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.ranks import run_ranks

STEPS = 6


@dataclass
class Run:
    """What a run leaves on one rank."""

    state: dict[str, Tensor]
    metrics: dict[str, float]
    extra: Any = None


@dataclass
class Script:
    """A training script.

    Attributes:
        model: Makes the LightningModule.
        dataset: Makes the training and the validation data.
        batch_size: Rows of a batch.
        trainer: Arguments of the Trainer.
        setup: Changes the module before the fit.
        after: What to look at when the fit is over, given the trainer and the module.
        dtype: Default dtype of the run.
        checkpoint: Where it goes on from.
    """

    model: Callable[[], L.LightningModule]
    dataset: Callable[[], tuple[TensorDataset, TensorDataset]]
    batch_size: int = 16
    trainer: dict[str, Any] = field(default_factory=dict)
    setup: Callable[[L.LightningModule], None] | None = None
    after: Callable[[L.Trainer, L.LightningModule], Any] | None = None
    dtype: torch.dtype = torch.float64
    checkpoint: Any = None

    def __call__(self, strategy: Any, devices: int) -> Run:
        """Runs the script; ``strategy`` is a name or the arguments of a PipelineStrategy."""
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        torch.manual_seed(0)
        torch.set_default_dtype(self.dtype)
        module = self.model()
        if self.setup is not None:
            self.setup(module)
        if isinstance(strategy, dict):
            from lightning_pipeline import PipelineStrategy

            strategy = PipelineStrategy(**strategy)
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        arguments = {"max_steps": STEPS, "max_epochs": 100, **quiet, **self.trainer}
        trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **arguments)
        training, validation = self.dataset()
        loaders = self.loader(training), self.validation_loader(validation)
        start = {} if self.checkpoint is None else {"ckpt_path": self.checkpoint}
        trainer.fit(module, *loaders, **start)
        extra = self.after(trainer, module) if self.after is not None else None
        state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return Run(state, metrics, extra)

    def loader(self, training: TensorDataset) -> DataLoader:
        """The training's loader."""
        return DataLoader(training, self.batch_size)

    def validation_loader(self, validation: TensorDataset) -> DataLoader:
        """The validation's loader."""
        return DataLoader(validation, max(2, self.batch_size // 2))

    def plain(self, replicas: int = 1, deadline: float = 60) -> Run:
        """The run without a pipeline: on one device, or as DDP."""
        strategy = "auto" if replicas == 1 else "ddp_find_unused_parameters_true"
        return run_ranks(replicas, self, strategy, replicas, deadline=deadline)[0]

    def pipelined(
        self, ranks: int, replicas: int = 1, deadline: float = 60, **arguments: Any
    ) -> list[Run]:
        """The run on ``ranks`` x ``replicas`` processes, by global rank."""
        arguments = {"pipeline_parallel_size": ranks, **arguments}
        world = ranks * replicas
        return run_ranks(world, self, arguments, world, deadline=deadline)


def distance(run: Run, reference: Run) -> float:
    """Largest difference of a parameter or buffer, relative to its largest; infinite with a NaN."""
    assert list(run.state) == list(reference.state)
    differences = [0.0]
    for name, expected in reference.state.items():
        found, expected = _numbers(run.state[name]), _numbers(expected)
        scale = expected.abs().max().clamp_min(1e-6) if expected.numel() else 1.0
        difference = (found - expected).abs().max() / scale if expected.numel() else 0.0
        differences.append(float(difference))
    return max(differences) if all(d == d for d in differences) else float("inf")


def _numbers(tensor: Tensor) -> Tensor:
    """``tensor`` in a type that can be subtracted."""
    return tensor if tensor.is_complex() else tensor.double()


def rows(count: int, *shape: int, seed: int = 7) -> Tensor:
    """``count`` rows of normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


def classes(count: int, *shape: int, top: int, seed: int = 8) -> Tensor:
    """``count`` rows of integers below ``top``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, (count, *shape), generator=generator)
