"""Runs in orders that come from files: searched ones, and one that no schedule has."""

from __future__ import annotations

import pytest

from lightning_pipeline.actions import Action
from lightning_pipeline.order_files import write_order
from lightning_pipeline.packing import Costs
from lightning_pipeline.search import search_order
from lightning_pipeline.simulate import StageBytes, StageTime
from tests.distributed.fits import distance
from tests.distributed.test_exactness import MICROBATCHES, TOLERANCE, reference, script

LAYOUTS = {
    "pp2": (2, 1, "loop"),
    "pp4": (4, 1, "loop"),
    "pp2 rounds": (2, 2, "loop"),
    "pp4 v": (4, 2, "v"),
}


def check(path, ranks):
    for run in script("transformer", "partial", 1).pipelined(ranks, schedule=str(path)):
        expected = reference("transformer", "partial", 1)
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_searched_orders_equal_one_device(layout, tmp_path):
    ranks, v, placement = LAYOUTS[layout]
    n = ranks * v
    times = [StageTime(1 + i % 3, 1 + i % 2, 2 - i % 2) for i in range(n)]
    costs = Costs(times, 0.5, [StageBytes(1, 1)] * n, [v * 3] * ranks)
    path = tmp_path / "orders.csv"
    write_order(search_order(costs, ranks, v, MICROBATCHES, placement), path)
    check(path, ranks)


def test_backwards_in_another_order_than_forwards(tmp_path):
    """The last microbatch comes back first, some backwards are whole and some are not."""
    order = range(MICROBATCHES)
    lists = [
        [
            *(Action(stage, "F", m) for m in order),
            *(Action(stage, op, m) for m in order[::-1] for op in ("IW", "B")[(stage + m) % 2]),
        ]
        for stage in range(2)
    ]
    path = tmp_path / "orders.csv"
    write_order(lists, path)
    check(path, 2)
