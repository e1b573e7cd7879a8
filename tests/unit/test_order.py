"""One order for the pieces of several calls."""

from __future__ import annotations

import numpy as np
import torch

from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.order import Order
from lightning_pipeline.steps.pending import TensorMeta


class Recording:
    """As much of a recording as an order reads."""

    def __init__(self, name, pieces, legal=None):
        self.piece_names = [f"{p}" for p in range(pieces)]
        self.legal = np.ones(pieces + 1, bool) if legal is None else np.array(legal)
        self.values = {v: TensorMeta((2,), torch.float64, True) for v in range(pieces + 1)}
        self.live = [[p] for p in range(pieces + 1)]


def call(name, reads, depends_on=(), writes=(), legal=None):
    pieces = [frozenset(piece.split()) for piece in reads]
    made = Call(
        name,
        ("", ()),
        frozenset(depends_on),
        Recording(name, len(pieces), legal),
        [1.0] * len(pieces),
        pieces,
        frozenset(writes),
        ambient=False,
    )
    made.outputs = [TensorMeta((4,), torch.float64, True)]
    return made


def test_one_call_is_a_chain():
    order = Order([call("net", ["a", "b", "c"])], woven=True)
    assert order.units == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert order.progress == [[0], [1], [2], [3]]
    assert order.names() == ["net.0", "net.1", "net.2"]
    assert order.bytes_at.tolist() == [0.0, 16.0, 16.0, 32.0]


def test_illegal_cuts_join_pieces():
    order = Order([call("net", ["a", "b", "c"], legal=[1, 1, 0, 1])], woven=True)
    assert order.units == [[(0, 0)], [(0, 1), (0, 2)]]


def test_a_weight_used_twice_in_one_call_does_not_join_it():
    order = Order([call("net", ["tied", "b", "tied"])], woven=True)
    assert len(order.units) == 3


def test_independent_calls_of_one_net_are_woven():
    calls = [call("net", ["a", "b"]), call("net", ["a", "b"])]
    assert Order(calls, woven=True).units == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert len(Order(calls, woven=False).units) == 4


def test_dependent_calls_keep_their_order():
    calls = [call("encoder", ["a", "b"]), call("decoder", ["c"], depends_on=[0])]
    assert Order(calls, woven=True).units == [[(0, 0)], [(0, 1)], [(1, 0)]]


def test_a_net_called_on_its_own_output_gets_replicas():
    calls = [call("net", ["a", "b"]), call("net", ["a", "b"], depends_on=[0])]
    assert len(Order(calls, woven=True).units) == 4


def test_an_averaged_copy_is_woven_with_its_original():
    calls = [call("net", ["a", "b"]), call("teacher", ["c", "d"])]
    twins = {"c": "a", "d": "b", "elsewhere": "a"}
    assert Order(calls, woven=True, twins=twins).units == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    calls[1] = call("teacher", ["c", "d"], depends_on=[0])
    assert len(Order(calls, woven=True, twins=twins).units) == 4


def test_what_other_steps_ask_for_comes_first():
    calls = [call("first", ["a"]), call("second", ["b"])]
    before = [(frozenset({"b"}), frozenset({"a"}))]
    assert Order(calls, woven=True, before=before).units == [[(1, 0)], [(0, 0)]]
    calls[1] = call("second", ["b"], depends_on=[0])  # in a circle nothing can be cut
    assert Order(calls, woven=True, before=before).units == [[(0, 0), (1, 0)]]


def test_what_is_on_an_early_stage_comes_first():
    calls = [call("first", ["a", "b"]), call("second", ["c", "d"])]
    stages = {"a": {0}, "b": {1}, "c": {0}, "d": {1}}
    order = Order(calls, True, stages_of=lambda names: frozenset(stages[next(iter(names))]))
    assert order.units == [[(0, 0)], [(1, 0)], [(0, 1)], [(1, 1)]]


def test_what_writes_a_buffer_lives_in_one_place():
    calls = [
        call("norm", ["w", "stats"], writes=["stats"]),
        call("other", ["x"], depends_on=[0]),
        call("norm", ["w", "stats"], depends_on=[0, 1], writes=["stats"]),
    ]
    units = Order(calls, woven=True).units
    # everything between the two writes is one unit
    assert [(0, 1), (1, 0), (2, 0), (2, 1)] in [sorted(unit) for unit in units]
