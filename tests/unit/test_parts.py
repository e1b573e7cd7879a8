"""Small pure parts of a pass: random streams, parked gradients, merged outputs."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipeline.errors import StepError
from lightning_pipeline.gradients import Parking
from lightning_pipeline.logs import LogRecorder
from lightning_pipeline.merging import Merger
from lightning_pipeline.metrics import StepMetrics
from lightning_pipeline.steps import mix, stream
from lightning_pipeline.steps.pending import Pending, TensorMeta
from tests.models.modules import Perceptron

CPU = torch.device("cpu")


def draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_a_stream_repeats_and_leaves_the_outer_generators_alone():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = [draws(), draws()]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    got = [draws()]
    with stream(7, CPU):
        first = draws()
    with pytest.raises(ValueError), stream(7, CPU):
        assert draws() == first
        raise ValueError
    got.append(draws())
    assert got == expected


def test_mixed_seeds_differ():
    seeds = {mix(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512 and min(seeds) >= 0 and max(seeds) < 2**63


def test_parking():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    a.grad = torch.tensor([5.0])
    parking = Parking()
    parking.clear_for_step([a, b], keep_old=True)
    assert a.grad is None
    a.grad, b.grad = torch.tensor([1.0]), torch.tensor([2.0])
    parking.park([a, b])
    assert a.grad.item() == 5 and b.grad is None
    a.grad = torch.tensor([10.0])  # a zero_grad that leaves something
    seen = []
    parking.hand_back(lambda: seen.append((a.grad.item(), b.grad.item())))
    assert seen == [(1.0, 2.0)]  # only the step's own gradients are completed
    assert a.grad.item() == 11 and b.grad.item() == 2


@dataclasses.dataclass
class Answer:
    rows: torch.Tensor
    texts: list[str]


ROWS = torch.arange(9.0).view(3, 3)
MERGED = {
    "rows": ([ROWS[:2], ROWS[2:]], ROWS),
    "arrays": ([ROWS[:2].numpy(), ROWS[2:].numpy()], ROWS.numpy()),
    "texts": ([["a", "b"], ["c"]], ["a", "b", "c"]),
    "dicts of samples": ([[{"n": 1}, {"n": 2}], [{"n": 3}]], [{"n": 1}, {"n": 2}, {"n": 3}]),
    "boxes of samples": ([[ROWS[:1], ROWS], [ROWS]], [ROWS[:1], ROWS, ROWS]),
    "another loader's": ([torch.ones(4, 1), torch.ones(2, 1)], torch.ones(6, 1)),
    "columns": ([[ROWS[:2], ROWS[:2]], [ROWS[2:], ROWS[2:]]], [ROWS, ROWS]),
    "single numbers": ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
    "floats": ([1.0, 4.0], 2.0),
    "numbers of samples": ([2, 1], 3),
    "equal": (["a", "a"], "a"),
    "unequal": (["a", "b"], ["a", "b"]),
    "nothing": ([None, None], None),
    "other shapes": ([ROWS[:1], ROWS], [ROWS[:1], ROWS]),
    "other keys": ([{"a": 1}, {"b": 1}], [{"a": 1}, {"b": 1}]),
    "dataclass": ([Answer(ROWS[:2], ["a", "b"]), Answer(ROWS[2:], ["c"])], Answer(ROWS, [*"abc"])),
    "nested": ([{"x": (ROWS[:2], None)}, {"x": (ROWS[2:], None)}], {"x": (ROWS, None)}),
}


@pytest.mark.parametrize(("values", "joined"), MERGED.values(), ids=MERGED)
def test_what_microbatches_made_is_joined(values, joined):
    def plain(value):
        if dataclasses.is_dataclass(value):
            value = vars(value)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return ["tensor", type(value).__name__, value.tolist()]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    merged = Merger([[2, 1], [4, 2]], [2 / 3, 1 / 3], set())(values, ())
    assert type(merged) is type(joined) and plain(merged) == plain(joined)


def test_whole_numbers_that_depend_on_the_microbatch_are_added():
    merge = Merger([[1, 1]], [0.5, 0.5], {("rows",)})
    values = {"rows": [1, 1], "index": [1, 1], "hits": [0, 1]}
    assert {n: merge(v, (n,)) for n, v in values.items()} == {"rows": 2, "index": 1, "hits": 1}
    assert merge([1, 1], ("hits",)) == 2  # it was seen to differ
    assert merge([torch.tensor(3)] * 2, ("rows",)) == 6
    merge = Merger([[1, 1]], [0.5, 0.5], set(), frozenset({("hits",)}), index=2)
    assert [merge([n, n], ("hits",)) for n in (0, 2, 3, 2)] == [0, 2, 6, 4]


def test_logs_are_weighted_by_rows():
    module = Perceptron()
    recorder = LogRecorder(module, StepMetrics(module), {}, set())
    for rows, value in ((3, 1.0), (1, 5.0)):
        recorder.rows = rows
        recorder("mean", torch.tensor(value))
        recorder("sum", value, reduce_fx="sum")
        recorder("max", value, reduce_fx=torch.max)
        recorder("own", value, batch_size=rows * rows)
        recorder.end()
    recorder.weigh([None, None])
    assert [value.item() for value in recorder.values(CPU)] == [2.0, 6.0, 5.0, 1.4]
    assert recorder.totals() == [4, 4, 4, 10]
    with pytest.raises(StepError, match="different arguments"):
        recorder("mean", 1.0, prog_bar=True)
    with pytest.raises(StepError, match="single value"):
        recorder("many", torch.ones(3))


def test_pending_spreads_and_cannot_be_read():
    pending = Pending.like(TensorMeta((2, 3), torch.float32, True), CPU)
    result = (pending.relu() + 1).sum()
    assert isinstance(result, Pending) and pending.shape == (2, 3) and result.requires_grad
    for read in (lambda: result.item(), lambda: bool(result > 0), lambda: float(result)):
        with pytest.raises(StepError, match="later pipeline stage"):
            read()
    with pytest.raises(StepError, match="later pipeline stage"):
        torch.zeros(2, 3).add_(pending.detach())
