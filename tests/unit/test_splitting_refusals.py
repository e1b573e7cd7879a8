"""What cannot be cut is refused with the line at fault, or kept whole inside a submodule."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.splitting import SplitError, StageFunction, record
from tests.models.registry import WIDTH, Chain

CASES: dict[str, tuple[type[Chain], str, str]] = {}


def refused(reason: str, line: str) -> Callable[[type[Chain]], type[Chain]]:
    """Note the reason that the error must give, and the source line that it must show."""

    def add(cls: type[Chain]) -> type[Chain]:
        CASES[cls.__name__] = (cls, reason, line)
        return cls

    return add


@refused("depends on the values of tensors", "if x.sum() > 0:")
class ValueBranch(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            x = x * 2
        return x


@refused("depends on the values of tensors", "return x * x.mean().item()")
class Item(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean().item()


class Cache:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Cached(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        return x + 1, Cache(x)


@refused("'cached' returns an object of type Cache", "x, _ = self.cached(x)")
class ReturnsObject(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.cached = Cached()

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.cached(x)
        return super().forward(x)


@refused("an object of type Cache carries tensors", "def forward(self, x: Tensor) -> Cache:")
class OutputsObject(Chain):
    def forward(self, x: Tensor) -> Cache:
        return Cache(super().forward(x))


class Reader(nn.Module):
    def forward(self, cache: Cache) -> Tensor:
        return cache.x + 1


@refused("an object of type Cache carries tensors", "return self.reader(Cache(x))")
class PassesObject(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(Cache(x))


class Appends(nn.Module):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return x + 1


@refused("'appends' changes a list, dict or object", "return self.appends(x, seen)")
class ChangesList(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.appends = Appends()

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        return self.appends(x, seen)


class Counter(nn.Module):
    def forward(self, x: Tensor, seen: dict[str, int]) -> Tensor:
        seen["count"] += 1
        return x * seen["count"]


@refused("'counter' changes a list, dict or object", "x = self.counter(x, seen)")
class CountsInDict(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        seen = {"count": 1}
        x = self.counter(x, seen)
        return super().forward(x) * seen["count"]


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # runs on made-up data only
            x = x + 0
        self.kept = self.linear(x)
        return self.kept + 1


@refused("came out of .* by another way than a return value", "x = x + self.keeper.kept")
class SideChannel(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def forward(self, x: Tensor) -> Tensor:
        x = self.keeper(x)
        x = x + self.keeper.kept
        return super().forward(x)


@refused("binds 'steps' of 'itself' to a new tensor", "self.steps = self.steps + 1")
class Rebinds(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return super().forward(x)


@refused("changes the number 'calls' of 'itself' from 0 to 1", "self.calls += 1")
class Counts(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@refused("its forward changes 'seen'", "def forward(self, x: Tensor) -> Tensor:")
class Collects(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return super().forward(x)


@refused("draws from Python's or NumPy's random generator", "x = self.layers[0](x)")
class PythonRandom(Chain):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 2:
            x = self.layers[0](x)
        return super().forward(x)


@refused("draws from Python's or NumPy's random generator", "x = x * scale")
class NumpyRandom(Chain):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(np.random.rand())
        x = x * scale
        return super().forward(x)


@refused("use_reentrant=True", "x = checkpoint(layer, x, use_reentrant=True)")
class Reentrant(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@refused("checkpoint over more than one call", "return self.layers[1](self.layers[0](x))")
class CheckpointedLines(Chain):
    def both(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False)


@refused("runs under saved-tensor hooks", "x = self.layers[0](x)")
class SavedTensorHooks(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = self.layers[0](x)
        return super().forward(x)


@refused("Tensor.register_hook cannot be recorded", "x.register_hook")
class TensorHook(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(lambda grad: grad * 2)
        return x


@refused("assigns to an attribute of a tensor", "x.data = x.data * 2")
class AssignsData(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.data = x.data * 2
        return x


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


@refused("the shape of the output, or a number in it, depends on values", "return x[x > 0]")
class ValueShape(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.selects = Selects()

    def forward(self, x: Tensor) -> Tensor:
        return self.selects(super().forward(x))


class Shortens(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x[:, : int(lengths.max())]


@refused("depends on values.*total_length=x.shape", "return x[:, : int(lengths.max())]")
class LongestRow(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.shortens = Shortens()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortens(super().forward(x), (x[..., 0] > 0).sum(1))


@refused("torch.autograd.grad needs a graph that no cut divides", "(slope,) = torch.autograd.grad(")
class OwnGradient(Chain):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope


@refused("raised ValueError: no", 'raise ValueError("no")')
class Raises(Chain):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def differentiable_input() -> Tensor:
    return torch.randn(2, 4, WIDTH, requires_grad=True)


def snapshot(module: nn.Module) -> list[Any]:
    return [
        {k: list(v) if isinstance(v, (list, dict)) else v for k, v in child.__dict__.items()}
        for child in module.modules()
    ]


@pytest.mark.parametrize("name", CASES)
def test_refusal_shows_the_line_and_leaves_no_trace(name: str) -> None:
    cls, reason, line = CASES[name]
    module, x = cls(), differentiable_input()
    before, call = snapshot(module), nn.Module.__call__
    generators = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    with pytest.raises(SplitError, match=reason) as caught:
        record(module, (x,), {}, num_stages=2)
    assert caught.value.module == ""
    assert caught.value.location is not None and caught.value.location[0] == __file__
    assert line in str(caught.value)
    assert snapshot(module) == before
    assert nn.Module.__call__ is call
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == generators


class Outer(nn.Module):
    """The case as a submodule, which can be kept whole."""

    def __init__(self, cls: type[Chain]) -> None:
        super().__init__()
        self.before, self.inner, self.after = Chain(2), cls(), Chain(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


WHOLE = sorted(set(CASES) - {"Raises", "ValueShape", "LongestRow", "OutputsObject"})


@pytest.mark.parametrize("name", WHOLE)
def test_a_submodule_at_fault_is_kept_whole(name: str) -> None:
    module, x = Outer(CASES[name][0]), differentiable_input()
    program = record(module, (x,), {}, num_stages=2)
    assert program.piece_names.count("inner") == 1
    assert not any(piece.startswith("inner.") for piece in program.piece_names)
    assert "inner" in program.leaves
    assert program.draws_outside_torch == ("Random" in name)
    random.seed(0)
    np.random.seed(0)
    expected = module(x)
    random.seed(0)
    np.random.seed(0)
    middle = program.num_pieces // 2
    while not program.legal[middle]:
        middle += 1
    carried = StageFunction(program, 0, middle)((), [x])
    out = StageFunction(program, middle, program.num_pieces)(carried, [x])
    if name not in ("Counts", "Collects"):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_failing_module_and_the_line_are_named() -> None:
    with pytest.raises(
        SplitError, match=r"Cannot cut inside .* \(.*`raise ValueError\(\"no\"\)`\)"
    ):
        record(Outer(Raises), (differentiable_input(),), {}, num_stages=2)
