"""Cutting batches of any structure."""

from __future__ import annotations

import threading
from collections import ChainMap, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from lightning_pipeline.batch import (
    checksum,
    copied,
    cut_batch,
    even_cut,
    num_rows,
    parts_of,
    signature,
)
from lightning_pipeline.errors import StepError
from lightning_pipeline.loaders import choose_cut, cut_together

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


class Inner(MutableMapping):
    """Keeps its data in a dict of its own, beside a list."""

    def __init__(self, **data):
        self._data, self.names = data, [*data]

    def __getitem__(self, key):
        return self._data[key]

    def __setitem__(self, key, value):
        self._data[key] = value

    def __delitem__(self, key):
        del self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class Slotted(Inner):
    __slots__ = ("_data",)

    def __init__(self, **data):
        self._data = data


class Bare(dict):
    __slots__ = ()


class AttrDict(dict):
    """Its keys are its attributes."""

    def __init__(self, **data):
        super().__init__(**data)
        self.__dict__ = self


class Twice(dict):
    """Has attributes of its own, one of which is a value too."""

    def __init__(self, **data):
        super().__init__(**data, number=3)
        self.x, self.lock = data["x"], threading.Lock()  # which nobody can copy


class Far(Inner):
    """Keeps its data where nobody looks."""

    def __init__(self, **data):
        self.far = SimpleNamespace(data=data)

    _data = property(lambda self: self.far.data)


class Refuses(Inner):
    def __copy__(self):
        raise TypeError("no copies")


MAPPINGS = {
    "defaultdict": lambda x: defaultdict(list, x=x),
    "UserDict": lambda x: UserDict(x=x),
    "ChainMap": lambda x: ChainMap({"x": x}, {"y": x}),
    **{kind.__name__: lambda x, kind=kind: kind(x=x) for kind in (Inner, Slotted, Bare)},
    "AttrDict": lambda x: AttrDict(x=x, inner=AttrDict(x=x)),
    "Twice": lambda x: Twice(x=x),
    "dataclass": lambda x: Sample(x, ["a"] * 6),
}


@pytest.mark.parametrize("case", MAPPINGS)
def test_containers_that_torch_does_not_know(case):
    x = torch.arange(12).view(6, 2)
    batch = MAPPINGS[case](x)
    assert num_rows(batch, "training_step") == 6
    parts = cut_batch(batch, even_cut(6, 2, 2))
    assert type(parts[0]) is type(batch)
    assert signature(parts[0]) == signature(parts[1]) != signature(batch)
    assert checksum(parts[0]) != checksum(parts[1])
    assert checksum(copied(batch)) == checksum(batch)
    for holder, rows in (
        (batch, x),
        (parts[0], x[:3]),
        (parts[1], x[3:]),
        (copied(parts[1]), x[3:]),
    ):
        if hasattr(holder, "keys"):
            assert torch.equal(holder["x"], rows)
        if case in ("AttrDict", "Twice"):
            assert holder.x is holder["x"]
        if case == "AttrDict":
            assert torch.equal(holder.inner.x, rows)


@pytest.mark.parametrize("kind", [Far, Refuses])
def test_mappings_that_cannot_be_copied_are_refused(kind):
    batch = kind(x=torch.ones(6))
    with pytest.raises(StepError, match=rf"a {kind.__name__}, which .*dict\(batch\).*collate_fn"):
        cut_batch(batch, even_cut(6, 2, 2))
    assert len(batch["x"]) == 6


def test_lists_of_samples_are_cut_as_lists():
    images = [torch.ones(3, 5 + i, 4) for i in range(4)]
    targets = [{"boxes": torch.ones(i + 1, 4)} for i in range(4)]
    batch = (images, targets)
    assert num_rows(batch, "training_step") == 4
    first, second = cut_batch(batch, even_cut(4, 2, 2))
    assert [len(part) for part in (*first, *second)] == [2, 2, 2, 2]
    assert second[0][1] is images[3] and second[1][0] is targets[2]


@pytest.mark.parametrize("make", [torch.ones, lambda *shape: np.ones(shape)])
def test_features_of_several_levels_are_no_list_of_samples(make):
    levels = [make(8, 4, 5), make(8, 5, 2)]
    batch = [torch.ones(8, 3), levels, torch.ones(8)]
    assert num_rows(batch, "training_step") == 8
    parts = cut_batch(batch, even_cut(8, 2, 2))
    assert [level.shape[0] for part in parts for level in part[1]] == [4] * 4
    images = [make(3, 4, 5), make(3, 5, 2)]  # with as many channels each
    first, second = cut_batch([images, torch.ones(2)], even_cut(2, 2, 2))
    assert first[0][0] is images[0] and second[0][0] is images[1]


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


@tensorclass
class Named:
    x: torch.Tensor
    name: str


def tensordict():
    inner = TensorDict({"z": torch.arange(7)}, batch_size=[7])
    return TensorDict({"x": torch.rand(7, 2), "in": inner, "s": "text"}, batch_size=[7])


@pytest.mark.parametrize(
    "batch",
    [tensordict(), Named(x=torch.rand(7, 2), name="a", batch_size=[7])],
    ids=["TensorDict", "tensorclass"],
)
def test_tensor_collections_are_cut_by_themselves(batch):
    assert num_rows(batch, "training_step") == 7
    cut = [copied(part) for part in cut_batch(batch, even_cut(7, 3, 3))]
    assert [part.batch_size for part in cut] == [(3,), (2,), (2,)]
    assert torch.equal(torch.cat([part.get("x") for part in cut]), batch.get("x"))
    assert signature(cut[1]) == signature(cut[2]) != signature(cut[0])
    children, rebuilt = parts_of(cut[0])
    kinds = (torch.Tensor, TensorDict)
    longer = [torch.cat([child] * 2) if isinstance(child, kinds) else child for child in children]
    assert rebuilt(longer).get("x").shape == (6, 2) and rebuilt(longer).batch_size == (6,)


def test_arrays_are_cut_and_told_apart():
    batch = [np.arange(14.0).reshape(7, 2), np.array(list("abcdefg"))]
    cut = cut_batch(batch, even_cut(num_rows(batch, "training_step"), 3, 3))
    assert np.array_equal(np.concatenate([part[0] for part in cut]), batch[0])
    assert [len(part[1]) for part in cut] == [3, 2, 2]
    other = copied(batch)
    assert checksum(other) == checksum(batch)
    other[0][3] += 1
    assert checksum(other) != checksum(batch) and signature(cut[1]) == signature(cut[2])


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [((8, 8), (2, 2, 2, 2)), ((8, 4), (2, 2, 2, 2)), ((6, 9), (2, 2, 2)), ((3, 8), (3,))],
)
def test_loaders_are_cut_into_equal_shares(rows, sizes):
    """Four microbatches at most, of a schedule that always runs four."""
    batch = {"a": [torch.rand(rows[0], 2), torch.rand(rows[0], 3)], "none": None}
    batch["b"] = [torch.rand(rows[1], 2), torch.rand(rows[1], 3)]
    cut = choose_cut(batch, "training_step", 1, lambda count: (min(count, 4), 4), 1)
    assert cut.sizes == sizes and cut.total == 4
    assert {sum(found) for found in cut.all_sizes} == {*rows} and cut.all_sizes[0] == sizes
    parts = cut_together(batch, "training_step", 1, cut)
    assert len(parts) == 4 and all(part["none"] is None for part in parts)
    for name in ("a", "b"):
        whole = torch.cat([part[name][0] for part in parts[: len(sizes)]])
        assert torch.equal(whole, batch[name][0])
    assert len({len(part["a"][0]) / len(part["b"][1]) for part in parts}) == 1


@pytest.mark.parametrize(
    "batch",
    [
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        {"x": torch.ones(3), "more": frozenset([torch.ones(2)])},
    ],
    ids=["nested", "set"],
)
def test_what_has_no_known_rows_is_refused(batch):
    with pytest.raises(StepError, match=r"training_step got .*\. .* in .*on_after_batch_transfer"):
        num_rows(batch, "training_step")
