"""A checkpoint with one changed bit is read as it was, or refused by the name of its file."""

from __future__ import annotations

import random
import shutil

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.files import WholeFiles
from lightning_pipeline.sharded import load
from tests.distributed.fits import Script

FILES = ["file", "folder/__0_0.distcp", "folder/.metadata", "folder/meta.pt"]
SEEDED = 150


class Tiny(L.LightningModule):
    """Of three numbers, so that its files are small."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Saves(Script):
    """Writes a checkpoint as a file and as a folder."""

    def __call__(self, strategy, devices):
        def after(trainer, module):
            for folders, name in ((False, "file"), (True, "folder")):
                trainer.strategy._shards_checkpoints = folders
                trainer.save_checkpoint(self.checkpoint / name)

        trainer = {"limit_val_batches": 0, "max_steps": 1}
        Script(Tiny, self.dataset, 2, trainer=trainer, after=after)(strategy, devices)


def numbers():
    data = TensorDataset(torch.arange(8.0, dtype=torch.float64).reshape(4, 2))
    return data, data


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    Saves(Tiny, numbers, checkpoint=folder).pipelined(1)
    return folder


def read(path):
    return load(path.parent) if path.parent.name == "folder" else WholeFiles().load_checkpoint(path)


def is_same(one, other):
    """Whether all is the same, down to the types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def check(saved, tmp_path, file, chosen):
    """Reads a file with each of the bits changed, by number, that ``chosen`` takes of a range."""
    path = shutil.copytree(saved, tmp_path / "saved") / file
    expected, whole = read(path), path.read_bytes()
    outcomes = set()
    for number in chosen(range(8 * len(whole))):
        data = bytearray(whole)
        data[number // 8] ^= 1 << number % 8
        path.write_bytes(data)
        try:
            outcome = "the same" if is_same(read(path), expected) else "another"
        except CheckpointError as error:
            outcome = "refused" if repr(str(path)) in str(error) else str(error)
        except Exception as error:
            outcome = repr(error)
        assert outcome in ("the same", "refused"), (number, outcome)
        outcomes.add(outcome)
    assert "refused" in outcomes


@pytest.mark.parametrize("file", FILES)
def test_some_bits(saved, tmp_path, file):
    check(saved, tmp_path, file, lambda bits: random.Random(0).sample(bits, SEEDED))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_many_bits(saved, tmp_path, file):
    check(saved, tmp_path, file, lambda bits: bits[::5])  # all places, each bit of a byte in turn


def test_a_folder_that_was_saved_without_the_checksum_of_its_list(saved, tmp_path):
    """Its list is read as far as it can be."""
    path = shutil.copytree(saved, tmp_path / "saved") / "folder"
    expected = read(path / "meta.pt")
    rest = torch.load(path / "meta.pt", weights_only=True)
    del rest["lightning_pipeline"]["list"]
    torch.save(rest, path / "meta.pt")
    assert is_same(read(path / "meta.pt"), expected)
    whole = (path / ".metadata").read_bytes()
    for number in random.Random(0).sample(range(8 * len(whole)), SEEDED):
        data = bytearray(whole)
        data[number // 8] ^= 1 << number % 8
        (path / ".metadata").write_bytes(data)
        try:
            assert is_same(read(path / "meta.pt"), expected), number
        except CheckpointError as error:
            assert str(path) in str(error), number


@pytest.mark.parametrize("file", ["file", "folder/__0_0.distcp"])
def test_a_record_that_is_marked_as_a_folder(saved, tmp_path, file):
    """Torch would take memory without a value for it."""
    path = shutil.copytree(saved, tmp_path / "saved") / file
    whole, at, marked = path.read_bytes(), -1, 0
    while (at := whole.find(b"PK\x01\x02", at + 1)) != -1:
        attributes = at + 38  # of the record's entry in the list of records
        assert whole[attributes] == 0
        path.write_bytes(whole[:attributes] + b"\x10" + whole[attributes + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            read(path)
        marked += 1
    assert marked > 3
