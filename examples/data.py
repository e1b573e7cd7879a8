"""Two small data sets that need no download: handwritten digits and Python's own documentation."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

DOCUMENTED = (
    "_pydecimal _pydatetime abc argparse ast asyncio.base_events asyncio.streams base64 bdb "
    "calendar cmd codecs collections configparser contextlib copy csv dataclasses datetime dbm "
    "difflib dis doctest email.message enum fileinput fnmatch fractions ftplib functools getopt "
    "getpass gettext glob gzip hashlib heapq hmac html http.client http.server imaplib importlib "
    "inspect io ipaddress json keyword linecache locale logging lzma mailbox mimetypes numbers "
    "operator os pathlib pdb pickle pickletools platform plistlib poplib posixpath pprint "
    "profile pstats pydoc queue quopri random re reprlib sched secrets selectors shelve shlex "
    "shutil smtplib socket socketserver sqlite3 statistics string subprocess tarfile tempfile "
    "textwrap threading timeit tokenize trace traceback turtle types typing unittest.case "
    "unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser "
    "xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipapp zipfile"
).split()
"""Modules of the standard library whose docstrings make the corpus, wherever Python has them."""


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
    """Docstrings of the standard library, as ASCII codes: tokens and next tokens (batch, block).

    The text is the running Python's own, so it differs a little from one version to the next and
    not at all between two runs of the same one.

    Args:
        batch_size: Blocks in a batch, for each replica of the model.
        block_size: Characters in a block.
        num_characters: Characters taken from the corpus; the last tenth is for validation, the
            tenth before it for test.
    """

    def __init__(
        self, batch_size: int = 32, block_size: int = 64, num_characters: int = 200_000
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.block_size = block_size
        self.num_characters = num_characters

    def setup(self, stage: str | None = None) -> None:
        text = docstrings()[: self.num_characters]
        codes = torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.long)
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


def docstrings() -> str:
    """Returns all docstrings of the documented modules in a fixed order, a blank line between two.

    The sources are parsed and not imported, because some modules do something when imported.
    """
    return "\n\n".join(text for name in DOCUMENTED for text in _docstrings_of(name))


def _docstrings_of(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
