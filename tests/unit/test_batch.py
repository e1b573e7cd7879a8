"""Cutting batches of any structure."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_pipeline.batch import checksum, copied, cut_batch, even_cut, num_rows, signature
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


@dataclass
class Sample:
    image: torch.Tensor
    name: list[str]


@pytest.mark.parametrize(
    "make",
    [lambda x: Sample(x, ["a"] * 6), lambda x: UserDict(x=x), lambda x: defaultdict(list, x=x)],
)
def test_containers_that_torch_does_not_know(make):
    batch = make(torch.arange(12).view(6, 2))
    assert num_rows(batch, "training_step") == 6
    parts = cut_batch(batch, even_cut(6, 2, 2))
    assert type(parts[0]) is type(batch)
    assert signature(parts[0]) == signature(parts[1]) != signature(batch)
    assert checksum(parts[0]) != checksum(parts[1])
    assert checksum(copied(batch)) == checksum(batch)


def test_lists_of_samples_are_cut_as_lists():
    images = [torch.ones(3, 5 + i, 4) for i in range(4)]
    targets = [{"boxes": torch.ones(i + 1, 4)} for i in range(4)]
    batch = (images, targets)
    assert num_rows(batch, "training_step") == 4
    first, second = cut_batch(batch, even_cut(4, 2, 2))
    assert [len(part) for part in (*first, *second)] == [2, 2, 2, 2]
    assert second[0][1] is images[3] and second[1][0] is targets[2]


def test_several_inputs_of_one_shape_are_no_list_of_samples():
    batch = ([torch.ones(6, 2), torch.ones(6, 2)], torch.ones(6))
    assert num_rows(batch, "training_step") == 6
    views, _ = cut_batch(batch, even_cut(6, 2, 2))[0]
    assert [len(view) for view in views] == [3, 3]


def test_the_size_of_most_tensors_counts_the_samples():
    batch = {"weights": torch.ones(3), "x": torch.ones(16, 6), "y": torch.ones(16)}
    assert num_rows(batch, "training_step") == 16
    with pytest.raises(StepError, match=r"20 and 16 are equally frequent.*first dim of every"):
        num_rows((torch.ones(20, 16, 2), torch.ones(16)), "training_step")
