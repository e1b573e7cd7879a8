"""Two small data sets that need no download: handwritten digits and Python's own library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class DigitsDataModule(L.LightningDataModule):
    """scikit-learn's 1797 handwritten digits: images (batch, 1, 8, 8) in [0, 1], labels (batch,).

    Args:
        batch_size: Images in a batch, for each replica of the model.
        seed: Decides which images are for training (1257), validation (270) and test (270).
    """

    def __init__(self, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str | None = None) -> None:
        digits = load_digits()
        images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.as_tensor(digits.target, dtype=torch.long)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        held_out = int(0.15 * len(labels) + 0.5)
        parts = order.split([len(labels) - 2 * held_out, held_out, held_out])
        self.train, self.val, self.test = (TensorDataset(images[i], labels[i]) for i in parts)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.test_dataloader()


class TextDataModule(L.LightningDataModule):
    """Texts of the standard library as ASCII codes: tokens and next tokens (batch, block).

    The text is the running Python's own, so it differs a little from one version to the next and
    not at all between two runs of the same one.

    Args:
        batch_size: Blocks in a batch, for each replica of the model.
        block_size: Tokens in a block.
        num_characters: Characters of text; the last tenth is for validation, the
            tenth before it for test.
        text: `"docstrings"`, or `"sources"` for the code with them.
        tokenizer: Folder or hub name of a tokenizer of transformers, whose tokens take the place
            of the ASCII codes; `None` for one token a character.
    """

    def __init__(
        self,
        batch_size: int = 16,
        block_size: int = 64,
        num_characters: int = 200_000,
        text: Literal["docstrings", "sources"] = "docstrings",
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.block_size = block_size
        self.num_characters = num_characters
        self.text = text
        self.tokenizer = tokenizer

    def setup(self, stage: str | None = None) -> None:
        text = {"docstrings": docstrings, "sources": sources}[self.text](self.num_characters)
        codes = torch.tensor(tokens_of(text, self.tokenizer), dtype=torch.long)
        # One code more than a block: the targets are the block moved on by one character.
        blocks = codes.unfold(0, self.block_size + 1, self.block_size)
        tenth = len(blocks) // 10
        parts = blocks.split([len(blocks) - 2 * tenth, tenth, tenth])
        train, test, val = (TensorDataset(part[:, :-1], part[:, 1:]) for part in parts)
        self.train, self.val, self.test = train, val, test

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.test_dataloader()


def tokens_of(text: str, tokenizer: str | None) -> list[int]:
    """Returns the ASCII codes of a text, or its tokens; see :class:`TextDataModule`."""
    if tokenizer is None:
        return list(text.encode("ascii", "replace"))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer)(text, add_special_tokens=False)["input_ids"]


def docstrings(num_characters: int) -> str:
    """Returns the first docstrings of the standard library's modules, in alphabetical order.

    The sources are parsed and not imported, because some modules do something when imported.

    Args:
        num_characters: Length of the text, if there are as many.
    """
    return _gathered(num_characters, _docstrings_of)


def sources(num_characters: int) -> str:
    """Returns the first sources of the standard library's modules, in alphabetical order.

    Args:
        num_characters: Length of the text, if there are as many.
    """
    return _gathered(num_characters, lambda path: [path.read_text(encoding="utf-8")])


def _gathered(num_characters: int, texts_of: Callable[[Path], Iterable[str]]) -> str:
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= num_characters:
            break
        text += "".join(f"{part}\n\n" for part in texts_of(path))
    return text[:num_characters]


def _docstrings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
