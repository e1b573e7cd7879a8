"""Tensors that travel together."""

from __future__ import annotations

import pytest
import torch

from lightning_pipeline.steps import TensorMeta
from lightning_pipeline.wire import PACKED, Parcel

LARGE = torch.randn(PACKED // 4)
SMALL = [
    torch.randn(3, 5),
    torch.tensor([True, False, True]),
    torch.arange(7),
    torch.randn(2, 3, dtype=torch.complex64),
    torch.randn(5).bfloat16(),
    torch.tensor(1.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.randn(4, 6).t(),
    torch.randn(3, dtype=torch.complex64).conj(),
]


@pytest.mark.parametrize(
    ("tensors", "messages"),
    [
        ([], 0),
        (SMALL[:1], 1),
        ([LARGE], 1),
        ([LARGE, SMALL[0]], 2),
        (SMALL, 1),
        ([*SMALL[:4], LARGE, *SMALL[4:], LARGE + 1], 3),
    ],
)
def test_what_arrives_is_what_was_sent(tensors, messages):
    metas = [TensorMeta.of(tensor) for tensor in tensors]
    sent = Parcel(metas).pack(tensors)
    room = Parcel(metas).empty(torch.device("cpu"))
    assert len(sent) == len(room) == messages
    for place, message in zip(room, sent, strict=True):
        assert message.is_contiguous() and message.shape == place.shape
        place.copy_(message)
    arrived = Parcel(metas).unpack(room)
    for tensor, found in zip(tensors, arrived, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        versions = [other._version for other in arrived]
        found += 0 if found.dtype != torch.bool else False
        assert [o._version for o in arrived if o is not found] == [
            v for v, o in zip(versions, arrived, strict=True) if o is not found
        ]
