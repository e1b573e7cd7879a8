"""The examples are ordinary Lightning code, and learn."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning_pipeline.examples.data import (
    DigitsDataModule,
    TextDataModule,
    docstrings,
    sources,
    tokens_of,
)
from lightning_pipeline.examples.diffusion import Diffusion
from lightning_pipeline.examples.hf import CausalLM
from lightning_pipeline.examples.images import ResNet, ViT
from lightning_pipeline.examples.segmentation import UNet
from lightning_pipeline.examples.sequences import LongEncoder
from lightning_pipeline.examples.synthetic import (
    Made,
    Needles,
    NeedlesDataModule,
    Shapes,
    ShapesDataModule,
)
from lightning_pipeline.examples.text import GPT

EXAMPLES = Path(__file__).parents[2] / "examples"


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("__init__", "quickstart")])
def test_models_and_data_know_nothing_of_pipelines(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text().lower()
    # The package's own name has the word in it.
    assert "pipeline" not in text.replace('pip install "lightning-pipeline[hf]"', "")


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
        (UNet(widths=(4, 8)), torch.rand(2, 1, 16, 24), (2, 3, 16, 24)),
        (
            UNet(in_channels=3, num_classes=2, widths=(4, 8, 8)),
            torch.rand(1, 3, 8, 8),
            (1, 2, 8, 8),
        ),
        (LongEncoder(width=8, heads=1), torch.randint(20, (2, 4096)), (2, 4)),
        (LongEncoder(9, 3, 8, 2, window=8, shrink=2), torch.randint(9, (2, 16)), (2, 3)),
    ],
)
def test_shapes(model: torch.nn.Module, batch: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert model(batch).shape == shape


@pytest.mark.parametrize("rank", [0, 2])
def test_shapes_of_models_of_transformers(rank: int) -> None:
    model = CausalLM(vocabulary=9, width=16, depth=1, heads=2, rank=rank)
    assert model(torch.randint(9, (2, 5))).shape == (2, 5, 9)


@pytest.mark.parametrize("kind", [GPT, CausalLM])
def test_language_models_see_no_later_character(kind: type[L.LightningModule]) -> None:
    model = kind(width=16, depth=2, heads=2).eval()
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
    assert len(docstrings(200_000)) == len(sources(200_000)) == 200_000


def test_sources_are_another_text() -> None:
    data = TextDataModule(block_size=16, num_characters=5000, text="sources")
    data.setup()
    assert sources(5000).startswith(bytes(data.train[0][0].tolist()).decode("ascii"))
    assert sources(5000) != docstrings(5000)


def test_text_in_the_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"?": 0, "to": 1, "be": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(tmp_path)
    assert tokens_of("to be or to", str(tmp_path)) == [1, 2, 0, 1]


@pytest.mark.parametrize("samples", [Shapes(4, 3, 32, 2), Needles(4, 3, 64, num_needles=1)])
def test_made_samples_are_the_same_by_their_index(samples: Made) -> None:
    first, again = list(samples), list(samples)
    assert len(first) == len(samples) == 4
    for (x, y), (same_x, same_y) in zip(first, again, strict=True):
        assert torch.equal(x, same_x) and torch.equal(y, same_y)
    assert not torch.equal(first[0][0], first[1][0])
    with pytest.raises(IndexError):
        samples[4]


def test_no_sample_is_for_training_and_for_validation() -> None:
    data = NeedlesDataModule(num_samples=8, length=64)
    data.setup()
    parts = [{tuple(codes.tolist()) for codes, _ in part} for part in (data.train, data.val)]
    assert [len(part) for part in parts] == [8, 2]
    assert not parts[0] & parts[1]


def test_the_class_of_a_haystack_is_the_pair_of_its_needles() -> None:
    seen = set()
    for codes, label in Needles(32, 0, 64, num_needles=3):
        assert set(codes[:32].tolist()) & {0, 1} == {int(label) // 2}
        assert set(codes[32:].tolist()) & {2, 3} == {2 + int(label) % 2}
        seen.add(int(label))
    assert seen == {0, 1, 2, 3}


def test_shapes_are_brighter_than_the_noise_around_them() -> None:
    images, masks = next(iter(_set_up(ShapesDataModule(4, 8, 64)).train_dataloader()))
    assert (images.shape, masks.shape) == ((4, 1, 64, 64), (4, 64, 64))
    assert set(masks.unique().tolist()) == {0, 1, 2}
    assert images[:, 0][masks > 0].mean() > 0.8 > 0.2 > images[:, 0][masks == 0].mean()


def _set_up(data: L.LightningDataModule) -> L.LightningDataModule:
    data.setup("fit")
    return data


def test_adapters_alone_are_trained() -> None:
    model = CausalLM(width=16, depth=2, heads=2, rank=2)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7
    assert all("lora_" in name for name in trained)
    assert all(p.requires_grad for p in CausalLM(width=16, depth=1, heads=2, rank=0).parameters())


@pytest.mark.parametrize("missing", ["transformers", "peft"])
def test_what_is_not_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        CausalLM(width=16, depth=1, heads=2)
    assert f"and {missing} is not installed" in str(caught.value)
    assert 'pip install "lightning-pipeline[hf]"' in str(caught.value)


def test_images_are_drawn_for_labels() -> None:
    model = Diffusion(num_steps=4, width=8, depth=1, heads=1).eval()
    with torch.no_grad():
        images = model.predict_step((torch.rand(3, 1, 8, 8), torch.tensor([1, 5, 9])), 0)
    assert images.shape == (3, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1


def test_no_noise_seen_leaves_the_image_as_it_was() -> None:
    """The last level is nearly the image; one that is told its true noise is clean again."""
    model = Diffusion(num_steps=10)
    image, noise = torch.rand(1, 1, 8, 8) * 2 - 1, torch.randn(1, 1, 8, 8)
    signal = model.signal[0]
    noisy = signal.sqrt() * image + (1 - signal).sqrt() * noise
    torch.testing.assert_close(model.less_noisy(noisy, noise, 0), image, atol=1e-5, rtol=1e-5)
    assert model.signal[0] > 0.97 and model.signal[-1] < 1e-3


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
    ("model", "data", "epochs", "metric", "bound"),
    [
        (ResNet, DigitsDataModule(), 5, "val_acc", 0.97),
        (partial(ViT, depth=2), DigitsDataModule(), 8, "val_acc", 0.9),
        (
            partial(GPT, width=64, depth=2),
            TextDataModule(8, num_characters=40_000),
            6,
            "val_acc",
            0.2,
        ),
        (
            partial(CausalLM, width=64, depth=2, rank=0),
            TextDataModule(8, num_characters=40_000, text="sources"),
            3,
            "val_acc",
            0.3,
        ),
        (partial(UNet, widths=(8, 16, 16)), ShapesDataModule(4, 96, 64, 3), 6, "val_iou", 0.6),
        (
            partial(LongEncoder, width=16, depth=3),
            NeedlesDataModule(8, 256, 512),
            6,
            "val_acc",
            0.9,
        ),
    ],
)
def test_models_learn(
    model: Callable[[], L.LightningModule],
    data: L.LightningDataModule,
    epochs: int,
    metric: str,
    bound: float,
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
    assert trainer.callback_metrics[metric] > bound


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_diffusion_draws_digits() -> None:
    """The nearest images of the training tell which digit a drawn image is."""
    from sklearn.neighbors import KNeighborsClassifier

    L.seed_everything(1)
    data = DigitsDataModule(32)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=25,
        limit_val_batches=0,
        callbacks=[EMAWeightAveraging(decay=0.99)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Diffusion(depth=2, learning_rate=3e-3)
    trainer.fit(model, data)
    drawn = torch.cat(trainer.predict(model, data))  # type: ignore[arg-type]
    images, labels = data.train.tensors
    judge = KNeighborsClassifier(5).fit(images.flatten(1), labels)
    assert judge.score(drawn.flatten(1), data.test.tensors[1]) > 0.6


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = importlib.import_module("lightning_pipeline.examples.quickstart")
    assert quickstart.main(strategy="auto", devices=1) > 0.95
