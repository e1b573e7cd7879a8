"""Cut models compute what the whole model computes: outputs, gradients and buffers."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_pipeline.splitting import (
    SplitError,
    StageFunction,
    canonical_names,
    is_elsewhere,
    record,
)
from tests.models.staged import (
    Backward,
    Staged,
    backpropagate,
    random_gradients,
    run_stages,
    seed_everything,
)
from tests.models.zoo import ZOO, Arguments, Model

BACKWARD_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}


def clone(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def run_whole(module: nn.Module, arguments: Arguments) -> tuple[Any, Backward]:
    args, kwargs = arguments
    out = module(*args, **kwargs)
    return out, lambda grads: backpropagate(pytree.tree_leaves(out), grads)


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    leaves, spec = pytree.tree_flatten(found)
    others, other_spec = pytree.tree_flatten(expected)
    assert spec == other_spec
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor):
            torch.testing.assert_close(leaf, other, rtol=tolerance, atol=tolerance)
        else:
            assert leaf == other


def gradients(modules: list[nn.Module]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad
    return total


def check(staged: Staged, reference: nn.Module, arguments: Arguments, model: Model) -> None:
    """Compare one call of the stages with one call of the whole module."""
    train = reference.training
    with torch.set_grad_enabled(train):
        stages = staged.stages(arguments, reference)
        seed_everything(1)
        out, backward = run_whole(reference, clone(arguments))
        seed_everything(1)
        staged_out, staged_backward = run_stages(stages, clone(arguments))
    assert_same(clone(staged_out), clone(out), BACKWARD_TOLERANCE[model.dtype] / 100)
    if train:
        grads = random_gradients(out)
        backward(grads)
        staged_backward(grads)
        expected = gradients([reference])
        found = gradients(staged.copies)
        assert found.keys() == expected.keys()
        scale = max((grad.abs().max().item() for grad in expected.values()), default=1.0)
        for name, grad in expected.items():
            error = (found[name] - grad).abs().max().item()
            assert error <= scale * BACKWARD_TOLERANCE[model.dtype], name
    for stage, pruned in enumerate(staged.copies):
        buffers = dict(reference.named_buffers(remove_duplicate=False))
        for name, buffer in pruned.named_buffers(remove_duplicate=False):
            holders = staged.holders[canonical_names(reference)[name]]
            assert is_elsewhere(buffer) == (stage not in holders)
            if stage in holders:
                torch.testing.assert_close(buffer, buffers[name])


CUT = {name: model for name, model in ZOO.items() if model.can_be_cut}
# The models of other libraries are large; real ranks cut them in 2 and 4.
CASES = [(name, n) for name, model in CUT.items() for n in model.cuts_in_one_process]


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_stages_equal_the_whole_model(name: str, num_stages: int) -> None:
    """Each stage in a copy whose other weights are gone; other sizes and modes follow."""
    model = ZOO[name]
    reference = model.build()
    keys = list(reference.state_dict())
    staged = Staged(reference, model.arguments(*model.sizes[0]), num_stages)
    assert list(reference.state_dict()) == keys
    for size in model.sizes[: None if num_stages == 3 else 1]:
        for train in (True, False):
            for module in (reference, *staged.copies):
                module.train(train)
                module.zero_grad()
            check(staged, reference, model.arguments(*size), model)
    assert [list(pruned.state_dict()) for pruned in staged.copies] == [keys] * num_stages


@pytest.mark.parametrize("name", CUT)
def test_every_legal_cut_at_once(name: str) -> None:
    """One stage for each piece that can stand alone shows what a cut forgets to carry."""
    model = ZOO[name]
    module = model.build()
    reference = copy.deepcopy(module)
    arguments = model.arguments(*model.sizes[0])
    program = record(module, *arguments, num_stages=8)
    bounds = [p for p in range(program.num_pieces + 1) if program.legal[p]]
    stages = [StageFunction(program, low, high) for low, high in itertools.pairwise(bounds)]
    seed_everything(1)
    out, backward = run_whole(reference, clone(arguments))
    seed_everything(1)
    staged_out, staged_backward = run_stages(stages, clone(arguments))
    assert_same(clone(staged_out), clone(out), 0.0)
    grads = random_gradients(out)
    backward(grads)
    staged_backward(grads)
    tolerance = BACKWARD_TOLERANCE[model.dtype]
    expected, found = gradients([reference]), gradients([module])
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)
    assert_same(dict(module.named_buffers()), dict(reference.named_buffers()), 0.0)


@pytest.mark.parametrize("name", [name for name in ZOO if name not in CUT])
def test_refused(name: str) -> None:
    model = ZOO[name]
    with pytest.raises(SplitError, match=re.escape(model.refusal)):
        record(model.build(), *model.arguments(*model.sizes[0]), num_stages=2)
