"""What a recording runs on, and what it sees of the world outside."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.splitting import ambient
from lightning_pipeline.splitting.ambient import outside_state
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.torch_private import FakeTensor

TENSORS: dict[str, Callable[[], Tensor]] = {
    "a weight": lambda: nn.Parameter(torch.zeros(2, 3)),
    "a frozen weight": lambda: nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "a transposed weight": lambda: nn.Parameter(torch.zeros(3, 2).t()),
    "an expanded buffer": lambda: torch.zeros(1).expand(4),
    "a buffer of numbers": lambda: torch.tensor(3),
    "a buffer with gradients": lambda: torch.zeros(2, requires_grad=True),
    "a weight on meta": lambda: nn.Parameter(torch.zeros(2, 3, device="meta")),
    "half precision": lambda: nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_stand_ins_of_weights_are_what_torch_makes_under_the_mode(name: str) -> None:
    tensor, module = TENSORS[name](), nn.Module()
    if isinstance(tensor, nn.Parameter):
        module.weight = tensor
    else:
        module.register_buffer("weight", tensor)
    sandbox = Sandbox(module, torch.device("cpu"))
    made, expected = sandbox.stand_ins[id(tensor)], sandbox.stand_in_for(tensor)
    assert isinstance(made, FakeTensor) and _facts(made) == _facts(expected)
    assert isinstance(made, nn.Parameter) == isinstance(tensor, nn.Parameter)


def _facts(tensor: Tensor) -> tuple[object, ...]:
    return (
        *(type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.layout),
        *(tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor._version),
        *(isinstance(tensor, nn.Parameter), str(torch._C._dispatch_keys(tensor))),
        tensor.untyped_storage().nbytes(),
    )


DRAWS: dict[str, Callable[[], object]] = {
    "a Python number": random.random,
    "a Python seed": lambda: random.seed(3),
    "a NumPy number": np.random.rand,
    "a normal NumPy number": np.random.randn,
    "a NumPy seed": lambda: np.random.seed(3),
    "many NumPy numbers": lambda: np.random.rand(312),  # the position comes round again
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_outside_of_torch_are_seen(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ambient._memory_is_known()
    monkeypatch.setattr(ambient, "_memory_is_known", lambda: known)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        _seed()
        before = outside_state()
        assert outside_state() == before
        DRAWS[name]()
        assert outside_state() != before
        _seed()
        assert outside_state() == before
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)


def test_draws_of_another_kind_of_generator_are_seen() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        before = outside_state()
        assert outside_state() == before
        np.random.rand()
        assert outside_state() != before
    finally:
        np.random.set_bit_generator(usual)
