"""Lightning's own demo modules, as they are: only the strategy is another one."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.mnist_datamodule import MNISTDataModule
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from torch import nn

from lightning_pipeline import PipelineStrategy
from tests.distributed.fits import Run, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE
from tests.models.modules import ImageClassifier

VOCABULARY = 40
FLAGS = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
STAGES = ("validate", "test", "predict")


class FourNumbers(boring.BoringModel):
    """For the data module whose training batches come from a list of loaders."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return {"loss": sum(self.step(part) for part in batch)}

    def validation_step(self, batch, batch_idx, dataloader_idx):
        return {"x": self.step(batch)}

    def test_step(self, batch, batch_idx, dataloader_idx):
        return {"y": self.step(batch)}

    def predict_step(self, batch, batch_idx, dataloader_idx):
        return self(batch)


class Digits(ImageClassifier):
    """MNIST's images are float32, the runs of the tests are not."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].double() / 255, batch[1]

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)


def small_lstm() -> LightningLSTM:
    """Of the demo's own parts; its hidden state goes from batch to batch."""
    module = LightningLSTM(VOCABULARY)
    module.model = SimpleLSTM(VOCABULARY, 8, 8, 1)
    return module


class Demo(NamedTuple):
    """One module of the demos.

    Attributes:
        model: Makes the LightningModule.
        data: Makes the LightningDataModule; ``None`` if the module has loaders of its own.
        evaluations: What follows the fit.
    """

    model: Callable[[], L.LightningModule]
    data: Callable[[], L.LightningDataModule] | None
    evaluations: tuple[str, ...]

    def __call__(self, strategy: Any, devices: int) -> Run:
        """Fits, then evaluates with the same trainer."""
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        module, data = self.model(), self.data and self.data()
        for child in module.modules():  # the masks of microbatches are others than a batch's
            if isinstance(child, nn.Dropout):
                child.p = 0.0
            if isinstance(child, (nn.MultiheadAttention, nn.LSTM)):
                child.dropout = 0.0
        if isinstance(strategy, dict):
            strategy = PipelineStrategy(**strategy)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_epochs=1,
            limit_train_batches=4,
            limit_val_batches=2,
            limit_test_batches=2,
            limit_predict_batches=3,
            **dict.fromkeys(FLAGS, False),
        )
        trainer.fit(module, datamodule=data)
        results = []
        for name in self.evaluations:
            torch.manual_seed(1)  # some of the data sets are drawn when their loader is made
            quiet = {} if name == "predict" else {"verbose": False}
            results.append(getattr(trainer, name)(module, datamodule=data, **quiet))
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        return Run(state, {n: float(v) for n, v in trainer.callback_metrics.items()}, results)


def mnist(folder: str = "data") -> L.LightningDataModule:
    return MNISTDataModule(folder, val_split=8, num_workers=0, batch_size=4)


DEMOS = {
    "BoringModel": Demo(boring.BoringModel, None, STAGES),
    "BoringDataModule": Demo(boring.BoringModel, boring.BoringDataModule, STAGES),
    "BoringDataModuleNoLen": Demo(boring.BoringModel, boring.BoringDataModuleNoLen, STAGES),
    "IterableBoringDataModule": Demo(FourNumbers, boring.IterableBoringDataModule, STAGES),
    "DemoModel": Demo(boring.DemoModel, boring.BoringDataModule, ("predict",)),
    "LightningTransformer": Demo(functools.partial(LightningTransformer, VOCABULARY), None, ()),
    "LightningLSTM": Demo(small_lstm, None, ()),
    "MNISTDataModule": Demo(Digits, mnist, ("validate", "test")),
}


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """What the demos would download, in small."""

    def text(destination: Path) -> None:
        destination.parent.mkdir(exist_ok=True)
        own = destination.with_suffix(f".{os.getpid()}")
        own.write_text("\n".join(f"a{i % 7} b{i % 11} c{i % 5}" for i in range(800)))
        own.replace(destination)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(WikiText2, "download", staticmethod(text))
    monkeypatch.setenv("PL_USE_MOCKED_MNIST", "1")
    digits = tmp_path / "data" / "MNIST" / "complete"
    digits.mkdir(parents=True)
    for name, count in (("training.pt", 64), ("test.pt", 24)):
        generator = torch.Generator().manual_seed(count)
        images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (count,), generator=generator)
        torch.save((images, labels), digits / name)


@pytest.mark.parametrize(
    ("name", "schedule", "replicas"),
    [
        *((name, "1F1B", 1) for name in DEMOS),
        ("BoringModel", "ZBVZeroBubble", 1),
        ("LightningTransformer", "ZBVZeroBubble", 1),
        ("BoringDataModule", "1F1B", 2),
    ],
)
def test_demo_equals_one_device(name, schedule, replicas, downloads):
    """Or as many devices as there are replicas."""
    demo = DEMOS[name]
    expected = run_ranks(replicas, demo, "auto" if replicas == 1 else "ddp", replicas)
    arguments = {"schedule": schedule, "data_parallel_size": replicas}
    for rank, run in enumerate(run_ranks(2 * replicas, demo, arguments, 2 * replicas)):
        own = expected[rank % replicas]
        assert distance(run, own) <= TOLERANCE
        assert run.metrics == pytest.approx(own.metrics, rel=1e-12)
        torch.testing.assert_close(run.extra, own.extra, rtol=1e-12, atol=1e-14)


def test_manual_optimization_is_refused():
    demo = Demo(boring.ManualOptimBoringModel, None, ())
    message = "ManualOptimBoringModel sets automatic_optimization=False"
    with pytest.raises(RankFailed, match=message):
        run_ranks(2, demo, {}, 2, deadline=30)
