"""The examples over two ranks: as on one device, and what they leave behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning_pipeline.examples.diffusion import Diffusion
from lightning_pipeline.examples.hf import CausalLM
from lightning_pipeline.examples.images import ViT
from lightning_pipeline.examples.segmentation import UNet
from lightning_pipeline.examples.sequences import LongEncoder
from lightning_pipeline.examples.synthetic import Needles, Shapes
from lightning_pipeline.examples.text import GPT
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.fits import Run, Script, classes, distance, rows
from tests.distributed.test_exactness import TOLERANCE

Parts = tuple[TensorDataset, TensorDataset]


def characters() -> Parts:
    codes = classes(24, 9, top=128)
    data = TensorDataset(codes[:, :-1], codes[:, 1:])
    return data, data


def made(samples: Shapes | Needles) -> Parts:
    columns = [torch.stack(column) for column in zip(*samples, strict=True)]
    data = TensorDataset(*(c.double() if torch.is_floating_point(c) else c for c in columns))
    return data, data


def digits() -> Parts:
    data = TensorDataset(rows(24, 1, 8, 8).sigmoid(), classes(24, top=10))
    return data, data


CASES: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Parts], dict[str, Any]]] = {
    "vit": (functools.partial(ViT, width=8, depth=3, heads=2), digits, {}),
    "gpt": (functools.partial(GPT, block_size=8, width=8, depth=3, heads=2), characters, {}),
    "unet": (
        functools.partial(UNet, widths=(4, 8, 8)),
        lambda: made(Shapes(24, 1, image_size=16, num_shapes=2)),
        {"schedule": "InterleavedZeroBubble"},
    ),
    "lora": (
        functools.partial(CausalLM, width=16, depth=3, heads=2, rank=2),
        characters,
        {"schedule": "ZBVZeroBubble"},
    ),
    "longseq": (
        functools.partial(LongEncoder, width=8, depth=3, window=8, shrink=2),
        lambda: made(Needles(24, 1, length=32, num_needles=1)),
        {"activation_checkpointing": "full"},
    ),
}


def with_sgd(module: L.LightningModule) -> None:
    """Another optimizer: Adam makes steps of the rounding errors of biases without gradient."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.configure_optimizers = lambda: torch.optim.SGD(trained, 0.1)  # type: ignore


@pytest.mark.parametrize("name", CASES)
def test_example_equals_one_device(name: str) -> None:
    model, data, arguments = CASES[name]
    script = Script(model, data, 8, trainer={"limit_val_batches": 2}, setup=with_sgd)
    expected = script.plain()
    for run in script.pipelined(2, num_microbatches=4, **arguments):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-10)


def drawn(trainer: L.Trainer, module: L.LightningModule) -> torch.Tensor:
    """Images for the first labels of the digits."""
    predicted = trainer.predict(module, DataLoader(digits()[0], 8))
    return torch.cat(predicted)  # type: ignore[arg-type]


def test_diffusion_draws_the_same_in_any_pipeline() -> None:
    """Its random numbers are a microbatch's, so the reference is one rank with microbatches."""
    script = Script(
        functools.partial(Diffusion, num_steps=5, width=8, depth=2, heads=2),
        digits,
        batch_size=8,
        trainer={"limit_val_batches": 2, "callbacks": [EMAWeightAveraging(decay=0.7)]},
        after=drawn,
    )
    [expected] = script.pipelined(1, schedule="GPipe", num_microbatches=4)
    for run in script.pipelined(2, num_microbatches=4):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-10)
        torch.testing.assert_close(run.extra, expected.extra)
    assert expected.extra.shape == (24, 1, 8, 8)


@pytest.mark.parametrize("rank", [0, 2])
def test_trained_weights_are_saved_for_transformers(tmp_path: Path, rank: int) -> None:
    """Adapters beside the base that they were trained on, or the whole model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, trained = tmp_path / "base", tmp_path / "trained"
    torch.manual_seed(3)
    CausalLM(width=16, depth=2, heads=2, rank=0).model.double().save_pretrained(base)
    script = Script(
        functools.partial(CausalLM, str(base), rank=rank, save_to=str(trained)),
        characters,
        batch_size=8,
        trainer={"max_steps": 2, "limit_val_batches": 0},
    )
    run: Run = script.pipelined(2)[0]
    loaded = AutoModelForCausalLM.from_pretrained(trained if rank == 0 else base)
    if rank:
        assert not (trained / "model.safetensors").exists()
        loaded = PeftModel.from_pretrained(loaded, trained)
    saved = {f"model.{name}": tensor for name, tensor in loaded.state_dict().items()}
    assert saved.keys() <= run.state.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, run.state[name]), name
