"""Calls of metrics in microbatches, made once with the whole batch."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torchmetrics.wrappers import MinMaxMetric

from lightning_pipeline.errors import StepError
from lightning_pipeline.joining import in_order, joined
from lightning_pipeline.metrics import StepMetrics
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps import patched
from tests.models.modules import Perceptron

ONES = torch.ones(5)
TWO, THREE = torch.tensor([0.0, 1]), torch.tensor([2.0, 3, 4])
ALL = torch.arange(5.0)
JOINED = {
    "numbers of samples": (((2,), (3,)), (5,)),
    "0-d numbers": (((torch.tensor(2),), (torch.tensor(3),)), (torch.tensor(5),)),
    "a constant": (((7,), (7,)), (7,)),
    "other numbers": (((7,), (8,)), None),
    "means": (((1.0,), (2.0,)), (1.6,)),
    "0-d means": (((torch.tensor(1.0),), (torch.tensor(2.0),)), (torch.tensor(1.6),)),
    "rows": (((TWO,), (THREE,)), (ALL,)),
    "tokens": (((torch.ones(4),), (torch.zeros(6),)), (torch.tensor([1.0] * 4 + [0] * 6),)),
    "a buffer": (((ONES,), (ONES,)), (ONES,)),
    "class weights": (((TWO, ONES), (THREE, torch.ones(5))), (ALL, ONES)),
    "other lengths": (((TWO, ONES), (THREE, torch.zeros(5))), None),
    "selected rows": (((TWO[:1], ALL[:1]), (THREE[:0], ALL[:0])), (TWO[:1], ALL[:1])),
    "equal selected rows": (((TWO[:1].clone(),), (TWO[:1].clone(),)), (torch.zeros(2),)),
    "another loader": (((THREE, 4), (TWO, 6)), (torch.tensor([2.0, 3, 4, 0, 1]), 10)),
    "tokens and samples": (
        ((torch.ones(4), TWO), (torch.ones(6), THREE)),
        (torch.ones(10), ALL),
    ),
    "what each row counts": (((TWO[:1], 1), (TWO[1:], 1)), (TWO, 1), (1, 1)),
    "texts": (((["a", "b"], [["c"], []]), (["d"], [["e"]])), (["a", "b", "d"], [["c"], [], ["e"]])),
    "dicts of samples": (
        (([{"n": TWO}],), ([{"n": THREE}, {"n": ALL}],)),
        ([{"n": TWO}, {"n": THREE}, {"n": ALL}],),
    ),
    "arrays": (((TWO.numpy(),), (THREE.numpy(),)), (ALL.numpy(),)),
    "other shapes": (((torch.ones(2, 2),), (torch.ones(3, 3),)), None),
    "one text": ((("mean",), ("mean",)), ("mean",)),
    "other texts": ((("a",), ("b",)), None),
    "nothing": (((None,), (None,)), (None,)),
}


@pytest.mark.parametrize("case", JOINED)
def test_joined_calls_of_metrics(case):
    (first, second), wanted, *rows = JOINED[case]
    result = joined([(first, {}), (second, {})], *(rows or [(2, 3)]), [(4, 6)])
    if wanted is None:
        assert result is None
    else:
        torch.testing.assert_close(_plain(result[0]), _plain(wanted))


def _plain(tree):
    """Texts as bytes: assert_close compares numbers."""
    if isinstance(tree, (list, tuple)):
        return [_plain(item) for item in tree]
    return list(tree.encode()) if isinstance(tree, str) else tree


def test_fractions_of_unknown_wholes_are_not_averaged():
    """The mean of (1, weight 0.5) and (2, weight 2.0) is no mean of the two numbers."""
    calls = [((1.0,), {"weight": 0.5}), ((2.0,), {"weight": 2.0})]
    assert joined(calls, [2, 3]) is None


@pytest.mark.parametrize(
    ("sequences", "order"),
    [
        ([[0, 1], [0, 1]], [0, 1]),
        ([[1], [0, 1]], [0, 1]),
        ([[0, 2], [0, 1, 2], [2, 3]], [0, 1, 2, 3]),
    ],
)
def test_order_of_calls_that_some_microbatches_leave_out(sequences, order):
    assert in_order(sequences) == order


class Apart(torchmetrics.MeanMetric):
    """Takes two tensors, whose numbers of rows have nothing to do with each other."""

    def update(self, first, second):
        super().update(torch.cat([first, second]))


class Needy(torchmetrics.MeanMetric):
    """Has no value without rows."""

    def update(self, values):
        if not len(values):
            raise ValueError("at least one row is needed")
        super().update(values)


class Measured(Perceptron):
    def __init__(self):
        super().__init__()
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
        self.both = torchmetrics.MetricCollection(
            {"f1": self.f1.clone(), "hit": torchmetrics.Accuracy("multiclass", num_classes=3)}
        )
        self.needy, self.mean = Needy(), torchmetrics.MeanMetric()
        self.apart, self.pair = Apart(), torchmetrics.MetricCollection([Apart()], prefix="x/")
        self.range = MinMaxMetric(Apart())


SCORES = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 1, 0, 2, 1, 2])
"""Of two microbatches, of four rows and of three, the first one lacks a class."""


class Measuring:
    """What ``use(module, scores, labels)`` makes of the two microbatches."""

    def __init__(self, use):
        self.module, self.made = Measured(), []
        self.metrics = StepMetrics(self.module)
        for rows in (slice(4), slice(4, 7)):
            self.metrics.begin(len(SCORES[rows]))
            with patched(self.metrics.patches()):
                made = use(self.module, SCORES[rows], LABELS[rows])
            self.made.append(self.metrics.marked(made))
        self.metrics.finish()


def selects(module, scores, labels):
    chosen = labels == 2
    return {**module.both(scores[chosen], labels[chosen]), "f1": module.f1(scores, labels)}


def leaves_out(module, scores, labels):
    chosen, value = labels == 2, None
    if chosen.any():
        value = module.f1(scores[chosen], labels[chosen])
    return module.f1(-scores, labels), value


def calls_twice(module, scores, labels):
    first, second = [module.f1(sign * scores, labels) for sign in (1, -1)]
    return {"a": first, "b": [second, module.f1(scores[:, [1, 2, 0]], labels)]}


def needs_rows(module, scores, labels):
    return module.needy(scores[labels == 2, 0])


def gives_other_lengths(module, scores, labels):
    chosen = scores[labels == 1, 1]
    return module.apart(scores[:, 0], chosen), module.pair(scores[:, 0], chosen)


def weighs(module, scores, labels):
    weight = labels.sum() / 7
    return module.mean((scores[:, 0] * labels).sum() / labels.sum(), weight=weight)


def updates(module, scores, labels):
    for label in labels.unique():
        module.f1.update(scores[labels == label], labels[labels == label])


@pytest.mark.parametrize(
    "use", [selects, leaves_out, calls_twice, needs_rows, gives_other_lengths, weighs, updates]
)
def test_values_are_those_of_the_whole_batch(use):
    run, reference = Measuring(use), Measured()
    wanted = use(reference, SCORES, LABELS)
    assert_same(run.metrics.filled(run.made[-1]), wanted)
    for name, metric in reference.named_modules():
        if isinstance(metric, torchmetrics.Metric) and metric._update_count:
            assert_same(run.module.get_submodule(name).compute(), metric.compute())
            if metric._forward_cache is not None:
                assert_same(run.metrics.batch_value(name), metric._forward_cache)


def assert_same(tree, wanted):
    given, spec = pytree.tree_flatten(tree)
    values, expected = pytree.tree_flatten(wanted)
    assert spec == expected
    for value, other in zip(given, values, strict=True):
        assert value is other or float(value) == pytest.approx(float(other), rel=1e-6)


def test_metrics_are_not_touched_before_the_batch_is_over():
    def use(module, scores, labels):
        module.f1(scores, labels)
        assert module.f1._update_count == 0
        with pytest.raises(StepError, match=r"computes self\.f1"):
            module.f1.compute()

    assert Measuring(use).module.f1._update_count == 1


def test_each_log_of_a_metric_is_of_its_latest_call():
    module, reference, origins = Measured(), Measured(), {}
    metrics = StepMetrics(module)
    for rows in (slice(4), slice(4, 7)):
        metrics.begin(len(SCORES[rows]))
        with patched(metrics.patches()):
            for sign in (1, -1):
                module.f1(sign * SCORES[rows], LABELS[rows])
                origins[sign] = metrics.origin_of(module.f1)
    metrics.finish()
    values = {sign: metrics.batch_value("f1", origin) for sign, origin in origins.items()}
    assert values == {sign: reference.f1(sign * SCORES, LABELS) for sign in (1, -1)}
    assert values[1] != values[-1]


def test_calls_that_cannot_be_told_apart_have_no_value():
    def use(module, scores, labels):
        for _ in range(len(scores) - 2):
            value = module.f1(scores, labels)
        return value

    run = Measuring(use)
    message = r"self\.f1 over the batch.*calls it 1 or 2 times.*call self\.f1\.update"
    with pytest.raises(StepError, match=message):
        run.metrics.filled(run.made[0])
    with pytest.raises(StepError, match=message):
        run.metrics.batch_value("f1")


def test_wrappers_are_not_updated_part_by_part():
    def use(module, scores, labels):
        module.range.update(scores[:, 0], scores[labels == 1, 1])

    with pytest.raises(StepError, match=r"self\.range in each microbatch cannot be joined.*a row"):
        Measuring(use)


def test_errors_of_the_whole_batch_are_those_of_the_call():
    with pytest.raises(ValueError, match="at least one row") as caught:
        Measuring(lambda module, scores, labels: module.needy(scores[labels == 3, 0]))
    if hasattr(caught.value, "__notes__"):  # of Python 3.11
        assert "test_joining.py" in caught.value.__notes__[0]
