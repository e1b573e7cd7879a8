"""What cannot be cut is refused with the line at fault, or kept whole inside a submodule."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.splitting import SplitError, StageFunction, record
from lightning_pipeline.splitting.pictures import Picture, redo
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


DEFINITION = "def forward(self, x: Tensor) -> Tensor:"


@refused("its forward changes 'stats'", DEFINITION)
class CountsInItsDict(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.stats = {"n": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.stats["n"] += 1
        return super().forward(x) * self.stats["n"]


@refused("its forward changes 'state'", DEFINITION)
class CountsInObject(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.state = [SimpleNamespace(count=0)]

    def forward(self, x: Tensor) -> Tensor:
        self.state[0].count += 1
        return super().forward(x) * self.state[0].count


@refused("its forward changes 'mode'", DEFINITION)
class SwitchesText(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.mode = "even"

    def forward(self, x: Tensor) -> Tensor:
        self.mode = "even" if self.mode == "odd" else "odd"
        return super().forward(x) * len(self.mode)


@refused("its forward changes 'sizes'", DEFINITION)
class GrowsTuple(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes = (*self.sizes, len(x))
        return super().forward(x) * len(self.sizes)


@refused("its forward changes 'first'", DEFINITION)
class FirstCall(Chain):
    """What changes at the first call alone changes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.first:
            x, self.first = x * 2, False
        return x


@refused("its forward changes 'count'", DEFINITION)
class CountsOnClass(Chain):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).count += 1
        return super().forward(x) * self.count


@refused("its forward changes 'get'", DEFINITION)
class CountsInClosure(Chain):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def get() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.get = get

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.get()


@refused("its forward changes 'rng'", DEFINITION)
class DrawsFromItsOwn(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rng.random()


@refused("it seeds torch's random generator", "return x + torch.rand_like(x)")
class Seeds(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch.manual_seed(0)
        return x + torch.rand_like(x)


@refused("a torch.Generator that is no attribute", "return x + torch.rand(x.shape, generator=made)")
class MakesGenerator(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        made = torch.Generator().manual_seed(0)
        return x + torch.rand(x.shape, generator=made)


@refused("its forward changes 'generator'", DEFINITION)
class SeedsOwnGenerator(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.generator.manual_seed(1)
        return x + torch.rand(x.shape, generator=self.generator)


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


@refused("draws from Python's or NumPy's random generator", "x = x * scale")
class NumpyRandomNormal(Chain):
    """Draws the second of two normal numbers that NumPy makes at once."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(np.random.randn())
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
    attributes = [
        {k: list(v) if isinstance(v, (list, dict)) else v for k, v in child.__dict__.items()}
        for child in module.modules()
    ]
    return [attributes, Picture(module.named_modules())]


def assert_same(now: list[Any], then: list[Any]) -> None:
    assert now[0] == then[0] and not then[1].changes()


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
    assert_same(snapshot(module), before)
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
    before = snapshot(module)
    program = record(module, (x,), {}, num_stages=2)
    assert_same(snapshot(module), before)
    assert program.piece_names.count("inner") == 1
    assert not any(piece.startswith("inner.") for piece in program.piece_names)
    assert "inner" in program.leaves
    assert program.draws_outside_torch == ("Random" in name)
    start = Picture(module.named_modules())
    random.seed(0)
    np.random.seed(0)
    expected = module(x)
    start.restore()
    random.seed(0)
    np.random.seed(0)
    middle = program.num_pieces // 2
    while not program.legal[middle]:
        middle += 1
    carried = StageFunction(program, 0, middle)((), [x])
    out = StageFunction(program, middle, program.num_pieces)(carried, [x])
    if name != "Rebinds":
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_failing_module_and_the_line_are_named() -> None:
    with pytest.raises(
        SplitError, match=r"Cannot cut inside .* \(.*`raise ValueError\(\"no\"\)`\)"
    ):
        record(Outer(Raises), (differentiable_input(),), {}, num_stages=2)


class Configured(Chain):
    """Fills in its configuration at its first call, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(kind=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "regression"
        return super().forward(x) * len(self.config.kind)


def test_what_is_set_once_is_set_on_all_ranks() -> None:
    module, x = Configured(), differentiable_input()
    program = record(module, (x,), {}, num_stages=2)
    assert module.config.kind is None and len(program.changed_settings()) == 1
    redo(program.changes)
    assert module.config.kind == "regression" and not program.changed_settings()


class Remembers(Chain):
    """Notes something that nobody in the recording reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        return super().forward(x)


def test_what_no_forward_reads_may_be_set() -> None:
    program = record(Remembers(), (differentiable_input(),), {}, num_stages=2)
    assert program.num_pieces == 12 and not program.changes


class Draws(Chain):
    """Three operations and one module draw from one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.noise = Noise(self.generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x) + torch.rand(x.shape, generator=self.generator)
        return self.layers[3](self.noise(self.layers[2](x)))


class Noise(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.source = {"generator": generator}

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, **self.source)


def test_all_that_draw_from_a_generator_are_on_one_stage() -> None:
    module, x = Draws(), differentiable_input()
    program = record(module, (x,), {}, num_stages=8)
    users = [p for p, i in enumerate(program.pieces) if program.nodes[i].generators]
    assert len(users) == 3 and program.piece_names[users[-1]] == "noise"
    assert not program.legal[users[0] + 1 : users[-1] + 1].any()
    assert program.legal[users[-1] + 1] and program.generators[users[0]] == {id(module.generator)}
