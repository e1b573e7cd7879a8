"""Values on a device are those of the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lightning_pipeline.backward import split_backward
from lightning_pipeline.batch import checksum
from lightning_pipeline.boundary import cross
from lightning_pipeline.steps import TensorMeta, stream
from lightning_pipeline.steps.microbatch import fingerprint
from lightning_pipeline.transfers import Readback, placed
from lightning_pipeline.wire import PACKED, Parcel
from tests.gpu.devices import no_waits, on_a_gpu, on_each_device

HOST = torch.device("cpu")
BATCHES = {
    "one": torch.arange(1000.0),
    "kinds": [torch.randn(5, 7), torch.arange(9), torch.ones(3).bool(), torch.ones(4).bfloat16()],
    "strided": {"x": torch.randn(6, 8).t(), "text": "a"},
    "complex": (torch.randn(40, dtype=torch.complex64), torch.empty(0, 3)),
}


def moved(tree, device):
    if isinstance(tree, dict):
        return {key: moved(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(moved(value, device) for value in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


@on_each_device
@pytest.mark.parametrize("name", BATCHES)
def test_checksums_and_fingerprints_are_those_of_the_host(name, device):
    batch = BATCHES[name]
    assert checksum(moved(batch, device)) == checksum(batch)
    found = fingerprint(moved(batch, device), device)
    assert found.device == device
    torch.testing.assert_close(found.cpu(), fingerprint(batch, HOST), rtol=1e-12, atol=0)


@on_each_device
def test_a_change_is_seen(device):
    batch = moved(BATCHES["kinds"], device)
    before, mark = checksum(batch), fingerprint(batch, device)
    batch[0][2, 0] += 1
    assert checksum(batch) != before
    assert fingerprint(batch, device) != mark


@on_each_device
def test_numbers_come_and_go_without_a_wait(device, monkeypatch):
    number = torch.tensor(2.5, dtype=torch.float64)
    on_device = torch.arange(12, device=device).view(3, 4)
    with no_waits(device, monkeypatch):
        there = placed(number, device)
        back, turned = Readback(on_device), Readback(on_device.t())
        mark = fingerprint((on_device, there), device)
    assert there.device == device and there.dtype == torch.float64 and there == 2.5
    assert mark.device == device
    assert back.wait().tolist() == on_device.tolist() and back.wait().is_cpu
    assert turned.wait().tolist() == on_device.t().tolist()


@on_each_device
def test_what_is_read_back_is_what_was_there_then(device):
    values = torch.zeros(1 << 20, device=device)
    back = Readback(values.clone())
    values.add_(1)
    assert back.wait().abs().max() == 0


@on_each_device
def test_parcels(device):
    tensors = [torch.randn(PACKED), torch.randn(3, 5), torch.arange(7), torch.tensor(1.5)]
    tensors = moved([*tensors, torch.randn(2, dtype=torch.complex64).conj()], device)
    parcel = Parcel([TensorMeta.of(tensor) for tensor in tensors])
    room = parcel.empty(device)
    for place, message in zip(room, parcel.pack(tensors), strict=True):
        assert place.device == message.device == device
        place.copy_(message)
    for tensor, found in zip(tensors, parcel.unpack(room), strict=True):
        assert torch.equal(tensor, found)


@on_each_device
def test_what_crosses_is_dense(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    crossed = cross((x * 2).t())
    assert crossed.is_contiguous() and torch.equal(crossed, (x * 2).t())
    crossed.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@on_each_device
def test_streams_of_random_numbers(device):
    outer = torch.rand(3, device=device)
    with stream(5, device):
        first = torch.rand(3, device=device), torch.rand(3)
    after = torch.rand(3, device=device)
    with stream(5, device):
        again = torch.rand(3, device=device), torch.rand(3)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(outer, after) and not torch.equal(after, first[0])


def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))


def convolution():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers, nn.Flatten(1))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(5, 8, padding_idx=1), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.rows(x.detach().sum(1).abs().long() % 5) * x)


STAGES = {"linear": linear, "convolution": convolution, "lookup": Lookup}


def gradients(module, device, split):
    """Those of weights and inputs over three microbatches, of work beside the default stream."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(6)]
    module.zero_grad()
    inputs = []
    beside = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(beside):  # nothing on the host
        for given, grad in zip(values[::2], values[1::2], strict=True):
            leaf, grad = given.to(device).requires_grad_(), grad.to(device)
            out = module(cross(leaf))
            if split:
                [found], deferred = split_backward([(get_gradient_edge(out), grad)], [leaf])
                inputs.append(found)
                deferred.run()
            else:
                out.backward(grad)
                inputs.append(leaf.grad)
    if beside is not None:
        torch.cuda.current_stream(device).wait_stream(beside)
    found = [*inputs, *(p.grad for p in module.parameters())]
    return [grad.cpu() for grad in found]


@on_each_device
@pytest.mark.parametrize("name", STAGES)
def test_both_parts_together_are_the_backward(name, device):
    torch.manual_seed(0)
    module = STAGES[name]().double().to(device)
    own = gradients(module, device, split=False)
    for mine, expected in zip(gradients(module, device, split=True), own, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


@on_a_gpu  # the host looks for the rows that were used, which is faster there
def test_weights_of_lookups_wait_for_nothing(device, monkeypatch):
    module = Lookup().to(device)
    ids = torch.tensor([0, 3, 1, 1, 4, 2], device=device)
    for waits in (True, False):
        out = module.last(module.rows(ids))
        grad = torch.ones_like(out)
        if waits:
            split_backward([(get_gradient_edge(out), grad)], [])[1].run()
            continue
        with no_waits(device, monkeypatch):
            split_backward([(get_gradient_edge(out), grad)], [])[1].run()
