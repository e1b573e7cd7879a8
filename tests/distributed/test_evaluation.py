"""Validation, test and prediction, in every order and form, against one device or DDP."""

from __future__ import annotations

import dataclasses
import functools
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import tokens, vectors
from tests.models.modules import LanguageModel, Perceptron

FLAGS = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


@dataclasses.dataclass
class Answer:
    out: Tensor
    names: list[str]


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Evaluates(Perceptron):
    """Returns something of every kind from every step."""

    def __init__(self):
        super().__init__(depth=4)

    def answer(self, batch, **more):
        out = self.net(batch[0])
        names = [f"row {value:.3f}" for value in batch[0][:, 0].tolist()]
        return {
            "answer": Answer(out, names),
            "pair": Pair(out.argmax(-1), (out * 2, [out[:, 0], out[:, 1]])),
            "texts": names,
            "nothing": None,
            "constant": 3,
            "kind": "class",
            "rows": len(out),
            "array": out.detach().numpy()[:, 0],
            "mean": out.mean(),
            **more,
        }

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.mse_loss(self.scale * out, batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return {**self.answer(batch), "loss": loss, "logits": out}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.mse_loss(self.scale * self.net(batch[0]), batch[1])
        self.log("val", loss)
        self.log("val_step", loss, on_step=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return self.answer(batch, index=f"{batch_idx} of {dataloader_idx}")

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.mse_loss(self.scale * self.net(batch[0]), batch[1])
        self.log("test", loss)
        return self.answer(batch, loss=loss)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.answer(batch, index=f"{batch_idx} of {dataloader_idx}")


class Texts(LanguageModel):
    """Evaluates sequences of other lengths than those it trains on."""

    def __init__(self):
        super().__init__(depth=1)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.step(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(-1)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.step(batch))


class Outputs(L.Callback):
    """Collects what hooks behind a batch are given."""

    def __init__(self):
        self.seen = []

    def _note(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        stage = trainer.state.stage.value
        self.seen.append((stage, outputs, batch, batch_idx, dataloader_idx))

    on_train_batch_end = on_validation_batch_end = _note
    on_test_batch_end = on_predict_batch_end = _note


class Writes(BasePredictionWriter):
    """Writes files as Lightning's documentation does."""

    def __init__(self, interval):
        super().__init__(interval)
        self.folder = Path(tempfile.mkdtemp())

    def write_on_batch_end(
        self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ):
        name = f"{trainer.global_rank}_{dataloader_idx}_{batch_idx}.pt"
        torch.save((prediction["answer"].out, batch_indices), self.folder / name)

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        outs = [[p["answer"].out for p in _as_list(loader)] for loader in _as_list(predictions)]
        torch.save((outs, batch_indices), self.folder / f"all_{trainer.global_rank}.pt")
        gathered = trainer.strategy.all_gather(torch.tensor(1.0))
        torch.save(gathered.sum(), self.folder / f"count_{trainer.global_rank}.pt")
        trainer.strategy.barrier()

    def files(self):
        return {p.name: torch.load(p) for p in sorted(self.folder.glob("*.pt"))}


def _as_list(value):
    return value if isinstance(value, list) else [value]


def vector_loaders(replicas):
    training, validation = vectors(29 * replicas)
    other = DataLoader(training, 5)
    return DataLoader(training, 16), [DataLoader(validation, 12), other]


def text_loaders(replicas):
    def longer(length, count):
        data, _ = tokens(count * replicas)
        rows = [(torch.cat([x, y])[:length], torch.cat([y, x])[:length]) for x, y in data]
        return DataLoader(rows, 6)

    return DataLoader(tokens(16 * replicas)[0], 8), [longer(5, 6), longer(13, 6)]


@dataclasses.dataclass
class Session:
    """Calls of one trainer after each other.

    Attributes:
        calls: Names of the Trainer's methods.
        model: Makes the LightningModule.
        loaders: Makes the training's and the evaluations' loaders.
        trainer: Arguments of the Trainer.
        predict: Arguments of ``trainer.predict``.
        writes: Interval of the prediction writer, ``None`` for none.
        replicas: Number of replicas.
    """

    calls: tuple[str, ...]
    model: Callable[[], L.LightningModule] = Evaluates
    loaders: Callable[[int], Any] = vector_loaders
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    predict: dict[str, Any] = dataclasses.field(default_factory=dict)
    writes: str | None = None
    replicas: int = 1

    def __call__(self, strategy: Any, devices: int) -> list[Any]:
        """Runs it; ``strategy`` is a name or the arguments of a PipelineStrategy."""
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        module, outputs = self.model(), Outputs()
        writers = [Writes(self.writes)] if self.writes else []
        arguments = {"max_epochs": 2, **dict.fromkeys(FLAGS, False), **self.trainer}
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=PipelineStrategy(**strategy) if isinstance(strategy, dict) else strategy,
            callbacks=[outputs, *writers],
            **arguments,
        )
        training, evaluation = self.loaders(self.replicas)
        results: list[Any] = []
        for call in self.calls:
            if call == "fit":
                trainer.fit(module, training, evaluation)
                results.append({n: float(v) for n, v in trainer.callback_metrics.items()})
            elif call == "predict":
                results.append(trainer.predict(module, evaluation, **self.predict))
            else:
                results.append(getattr(trainer, call)(module, evaluation, verbose=False))
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        return [results, outputs.seen, state, [w.files() for w in writers]]


def assert_same(value: Any, wanted: Any) -> None:
    """Compares any tree, floating-point numbers to 1e-10."""
    assert type(value) is type(wanted), (type(value), type(wanted))
    if isinstance(wanted, (Tensor, np.ndarray)):
        assert value.dtype == wanted.dtype
        torch.testing.assert_close(
            torch.as_tensor(value), torch.as_tensor(wanted), rtol=1e-10, atol=1e-13
        )
    elif isinstance(wanted, Mapping):
        assert list(value) == list(wanted)
        for key in wanted:
            assert_same(value[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(value) == len(wanted)
        for one, other in zip(value, wanted, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(wanted):
        assert_same(vars(value), vars(wanted))
    else:
        assert value == (pytest.approx(wanted, rel=1e-10) if type(wanted) is float else wanted)


EVALUATIONS = ("validate", "test", "predict")
SESSIONS = {
    "before a fit": Session(EVALUATIONS),
    "behind a fit": Session(("fit", *EVALUATIONS), trainer={"max_epochs": 1}),
    "without inference mode": Session(("fit", "predict"), trainer={"inference_mode": False}),
    "sequences of other lengths": Session(("fit", *EVALUATIONS), Texts, text_loaders),
    "ten epochs, twice in each": Session(
        ("fit",), trainer={"max_epochs": 10, "val_check_interval": 0.5, "limit_val_batches": 1}
    ),
    "by steps": Session(
        ("fit",),
        trainer={
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": -1,
        },
    ),
    "writes only": Session(("predict",), predict={"return_predictions": False}, writes="batch"),
    "writes at the end": Session(("predict",), writes="epoch"),
    "replicas": Session(("fit", *EVALUATIONS), writes="batch_and_epoch", replicas=2),
}


@functools.cache
def reference(case: str) -> list[list[Any]]:
    session = SESSIONS[case]
    name = "auto" if session.replicas == 1 else "ddp"
    return run_ranks(session.replicas, session, name, session.replicas)


LAYOUTS = [(case, "1F1B") for case in SESSIONS]
LAYOUTS += [("behind a fit", "ZBVZeroBubble")]


@pytest.mark.parametrize(("case", "schedule"), LAYOUTS)
def test_evaluations_equal_one_device(case, schedule):
    session, expected = SESSIONS[case], reference(case)
    arguments = {
        "schedule": schedule,
        "num_microbatches": 2,
        "data_parallel_size": session.replicas,
    }
    world = 2 * session.replicas
    for rank, got in enumerate(run_ranks(world, session, arguments, world)):
        wanted = expected[rank % session.replicas]
        assert_same(got[:3], wanted[:3])
        if rank < session.replicas:  # the last stages write, each replica its share
            assert_same(got[3], wanted[3])
        else:
            assert got[3] == [{} for _ in wanted[3]]
