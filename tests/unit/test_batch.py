"""Cutting batches of any structure."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from lightning_pipeline.batch import checksum, cut_batch, even_cut, num_rows
from lightning_pipeline.errors import StepError

Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("rows", "real", "sizes"), [(16, 4, (4, 4, 4, 4)), (13, 4, (4, 3, 3, 3)), (2, 2, (1, 1))]
)
def test_even_cut(rows, real, sizes):
    cut = even_cut(rows, real, real + 1)
    assert cut.sizes == sizes
    assert sum(cut.share(index) for index in range(cut.total)) == pytest.approx(1)
    assert cut.share(real) == 0 and cut.is_filler(real) and not cut.is_filler(real - 1)


def test_every_structure_is_cut():
    batch = {
        "tensor": torch.arange(14).view(7, 2),
        "words": [f"w{i}" for i in range(7)],
        "pair": Pair(torch.arange(7), torch.arange(3)),
        "nested": [torch.arange(7), (torch.arange(7.0), {"deep": torch.ones(7, 1)})],
        "number": 7,
        "text": "text",
        "nothing": None,
        "scalar": torch.tensor(1.0),
        "empty": [],
    }
    cut = even_cut(7, 3, 4)
    parts = cut_batch(batch, cut)
    assert len(parts) == 4 and parts[3] is parts[0]
    assert torch.equal(torch.cat([part["tensor"] for part in parts[:3]]), batch["tensor"])
    assert [word for part in parts[:3] for word in part["words"]] == batch["words"]
    assert [len(part["words"]) for part in parts] == [3, 2, 2, 3]
    assert isinstance(parts[0]["pair"], Pair)
    assert [len(part["pair"].first) for part in parts] == [3, 2, 2, 3]
    assert len(parts[0]["nested"][1][1]["deep"]) == 3
    for key in ("number", "text", "nothing", "scalar", "empty"):
        assert parts[1][key] is batch[key] or parts[1][key] == batch[key]
    # what does not count samples goes whole into every microbatch
    assert torch.equal(parts[1]["pair"].second, batch["pair"].second)


def test_batch_without_rows_is_refused():
    with pytest.raises(StepError, match="cannot be cut into microbatches"):
        num_rows({"text": "words", "scalar": torch.tensor(1)}, "training_step")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_checksum_tells_batches_apart(dtype):
    batch = {"x": torch.ones(5, 3).to(dtype), "text": "a"}
    other = {"x": batch["x"].clone(), "text": "a"}
    assert checksum(batch) == checksum(other)
    other["x"][3, 1] = 0
    assert checksum(batch) != checksum(other)
    assert checksum(batch) != checksum({"x": batch["x"].view(3, 5), "text": "a"})
