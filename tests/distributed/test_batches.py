"""Batches of every kind are cut as they are, or refused with the hook to override."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from tests.distributed.feeds import Several, feeds
from tests.distributed.fits import Script
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import vectors
from tests.models.modules import Perceptron


@dataclass
class Record:
    x: Tensor
    y: Tensor
    ids: list[str] = field(default_factory=list)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(UserDict):
    """As the tokenizers of transformers return it: a UserDict that moves itself."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any, non_blocking: bool = False) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def checked(x: Tensor, *others: Any) -> Tensor:
    """``x``, which must have as many rows as everything beside it."""
    assert {len(x)} == {len(other) for other in others}
    return x


def td(x, y):
    inner = TensorDict({"twice": 2 * x}, batch_size=[len(x)])
    return TensorDict({"x": x, "y": y, "in": inner}, batch_size=[len(x)])


BATCHES: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dataclass": (
        lambda x, y: Record(x, y, [f"row {i}" for i in range(len(x))]),
        lambda b: (checked(b.x, b.ids), b.y),
    ),
    "NamedTuple": (Pair, lambda b: (b.x, b.y)),
    "TensorDict": (td, lambda b: (checked(b["in", "twice"], b, b["in"]) / 2, b["y"])),
    "BatchEncoding": (lambda x, y: Encoding(x=x, y=y), lambda b: (b.x, b["y"])),
    "texts": (
        lambda x, y: (x, ["a"] * len(x), y, "text"),
        lambda b: (checked(b[0], b[1]), b[2]),
    ),
    "None": (lambda x, y: {"x": x, "y": y, "mask": None}, lambda b: (b["x"], b["y"])),
    "nested": (
        lambda x, y: [{"in": (x, [y, {"deep": x}])}],
        lambda b: (checked(b[0]["in"][0], b[0]["in"][1][1]["deep"]), b[0]["in"][1][0]),
    ),
    "0-d": (
        lambda x, y: {"x": x, "y": y, "scale": torch.tensor(2.0), "n": 3},
        lambda b: (b["x"] * b["scale"] * b["n"], b["y"]),
    ),
    "arrays": (
        lambda x, y: {"x": x.numpy(), "y": y, "weights": np.ones(3)},
        lambda b: (torch.from_numpy(b["x"]), b["y"] * torch.from_numpy(b["weights"])),
    ),
    "only arrays": (
        lambda x, y: (x.numpy(), y.numpy()),
        lambda b: (torch.from_numpy(b[0]), torch.from_numpy(b[1])),
    ),
    "lists of samples": (
        lambda x, y: [[row[: 3 + i % 3] for i, row in enumerate(x)], y],
        lambda b: (torch.stack([F.pad(row, (0, 6 - len(row))) for row in b[0]]), b[1]),
    ),
}


class Unpacks(Perceptron):
    """Takes its batch apart."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.unpack = unpack

    def error(self, batch, name):
        x, y = self.unpack(batch)
        error = F.mse_loss(self.net(x), y)
        self.log(name, error, batch_size=len(x))  # Lightning does not know all kinds of batches
        return error

    def training_step(self, batch, batch_idx):
        return self.error(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.error(batch, "val_loss")


def collated(pack, samples):
    x, y = zip(*samples, strict=True)
    return pack(torch.stack(x), torch.stack(y))


def packed_loaders(pack):
    training, validation = vectors(35)
    collate = partial(collated, pack)
    return {
        "train_dataloaders": DataLoader(training, 16, collate_fn=collate),
        "val_dataloaders": DataLoader(validation, 8, collate_fn=collate),
    }


def test_batches_of_every_kind():
    scripts: dict[str, Script] = {
        name: feeds(partial(packed_loaders, pack), partial(Unpacks, unpack))
        for name, (pack, unpack) in BATCHES.items()
    }
    Several(scripts).compare()


class Graph:
    """As the batches of torch_geometric: an object that moves itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return Graph(self.x.to(device), self.y.to(device))


class Holder:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


UNCUTTABLE = {
    "object that moves itself": (Graph, "an object of type Graph"),
    "object beside tensors": (lambda x, y: (x, Holder(x, y)), "an object of type Holder"),
    "packed sequence": (
        lambda x, y: (pack_padded_sequence(x[..., None], [6] * len(x), True), y),
        "a PackedSequence",
    ),
    "sparse": (lambda x, y: (x.to_sparse(), y), r"a torch.sparse_coo tensor.*x.to_dense\(\)"),
}


@pytest.mark.parametrize("case", UNCUTTABLE)
def test_batches_that_cannot_be_cut_name_the_hook(case):
    pack, message = UNCUTTABLE[case]
    script = feeds(partial(packed_loaders, pack))
    message += r".*on_after_batch_transfer, transfer_batch_to_device or.*collate_fn"
    with pytest.raises(RankFailed, match=f"(?s)_step got {message}"):
        script.pipelined(2, deadline=30)
