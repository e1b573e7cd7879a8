"""The examples are ordinary Lightning code, and learn."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning_pipeline.examples.data import DigitsDataModule, TextDataModule, docstrings
from lightning_pipeline.examples.images import ResNet, ViT
from lightning_pipeline.examples.text import GPT

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["images", "text", "data"])
def test_models_and_data_know_nothing_of_pipelines(name: str) -> None:
    assert "pipeline" not in (EXAMPLES / f"{name}.py").read_text().lower()


def test_quickstart_names_the_library_twice_and_is_short() -> None:
    lines = (EXAMPLES / "quickstart.py").read_text().splitlines()
    body = lines[lines.index("import lightning as L") :]
    assert sum("pipeline" in line for line in body) == 2
    assert len([line for line in body if line]) <= 50


@pytest.mark.parametrize(
    ("model", "batch", "shape"),
    [
        (ResNet(widths=(4, 8), blocks=1), torch.rand(3, 1, 8, 8), (3, 10)),
        (ResNet(in_channels=3, num_classes=7, widths=(4,)), torch.rand(2, 3, 9, 9), (2, 7)),
        (ViT(width=16, depth=1, heads=2), torch.rand(3, 1, 8, 8), (3, 10)),
        (ViT(image_size=12, patch_size=4, width=16, depth=2), torch.rand(2, 1, 12, 12), (2, 10)),
        (GPT(width=16, depth=1, heads=2), torch.randint(128, (2, 64)), (2, 64, 128)),
        (GPT(width=16, depth=2, heads=2), torch.randint(128, (2, 9)), (2, 9, 128)),
    ],
)
def test_shapes(model: torch.nn.Module, batch: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert model(batch).shape == shape


def test_gpt_sees_no_later_character() -> None:
    model = GPT(width=16, depth=2, heads=2).eval()
    codes = torch.randint(128, (1, 12))
    changed = codes.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 128
    with torch.no_grad():
        before, after = model(codes), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_digits_are_split_once_and_for_all() -> None:
    first, second, other = DigitsDataModule(), DigitsDataModule(), DigitsDataModule(seed=1)
    for data in (first, second, other):
        data.setup()
    assert [len(part) for part in (first.train, first.val, first.test)] == [1257, 270, 270]
    assert torch.equal(first.val.tensors[0], second.val.tensors[0])
    assert not torch.equal(first.val.tensors[0], other.val.tensors[0])
    images, labels = next(iter(first.val_dataloader()))
    assert (images.shape, labels.shape) == ((64, 1, 8, 8), (64,))
    assert 0 <= images.min() <= images.max() == 1


def test_text_targets_are_the_next_characters() -> None:
    data = TextDataModule(batch_size=4, block_size=16, num_characters=5000)
    data.setup()
    codes, targets = data.train[:2]
    assert torch.equal(codes[:, 1:], targets[:, :-1])
    assert targets[0, -1] == codes[1, 0]
    text = bytes(codes[0].tolist()).decode("ascii")
    assert docstrings(5000).startswith(text)


def test_corpus_is_large_enough_for_the_configured_text() -> None:
    assert len(docstrings(200_000)) == 200_000


@pytest.fixture
def _one_thread() -> Iterator[None]:
    # Small operations are slower on several threads, many times so on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("model", "data", "epochs", "bound"),
    [
        (ResNet, DigitsDataModule(), 5, 0.97),
        (partial(ViT, depth=2), DigitsDataModule(), 8, 0.9),
        (partial(GPT, width=64, depth=2), TextDataModule(8, num_characters=40_000), 6, 0.2),
    ],
)
def test_models_learn(
    model: Callable[[], L.LightningModule], data: L.LightningDataModule, epochs: int, bound: float
) -> None:
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model(), data)
    assert trainer.callback_metrics["val_acc"] > bound


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = importlib.import_module("lightning_pipeline.examples.quickstart")
    assert quickstart.main(strategy="auto", devices=1) > 0.95
