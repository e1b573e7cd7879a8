"""What a forward reads besides tensors may change during a run, by whatever way it reads it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import Perceptron

BATCHES = 6
CASES: dict[str, type[Changing]] = {}


class Factor(nn.Module):
    """Linear layers, and a factor that `factor` makes of what is changed."""

    def __init__(self, model: Changing) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.head = nn.Linear(6, 3)
        self.factor = model.factor
        model.prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x) * type(self).factor_of(self))

    def factor_of(self) -> Any:
        return self.factor(self)


class Changing(Perceptron):
    """Changes something that a forward reads in front of every second batch."""

    net_class = Factor
    changes = True

    def __init__(self) -> None:
        super().__init__()
        self.net = self.net_class(self)

    def prepare(self, net: nn.Module) -> None:
        """Puts the thing there, with the value 1."""

    def change(self, net: nn.Module, value: float) -> None:
        """Gives it another value."""

    @staticmethod
    def factor(net: nn.Module) -> Any:
        """The value, as the forward reads it."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.changes:
            self.change(self.net, 1.0 + batch_idx // 2 % 3)


def case(cls: type[Changing]) -> type[Changing]:
    CASES[cls.__name__] = cls
    return cls


# ---- attributes of a called module


@case
class Number(Changing):
    def prepare(self, net):
        net.k = 1.0

    def change(self, net, value):
        net.k = value

    @staticmethod
    def factor(net):
        return net.k


@case
class PrivateNumber(Changing):
    def prepare(self, net):
        net._k = 1.0

    def change(self, net, value):
        net._k = value

    @staticmethod
    def factor(net):
        return net._k


@case
class DictEntry(Changing):
    def prepare(self, net):
        net.cfg = {"deep": {"k": 1.0}}

    def change(self, net, value):
        net.cfg["deep"]["k"] = value

    @staticmethod
    def factor(net):
        return net.cfg["deep"]["k"]


@case
class ListEntry(Changing):
    def prepare(self, net):
        net.values = [1.0, 2.0]

    def change(self, net, value):
        net.values[0] = value

    @staticmethod
    def factor(net):
        return net.values[0]


@case
class TupleValue(Changing):
    def prepare(self, net):
        net.values = (1.0, 2.0)

    def change(self, net, value):
        net.values = (value, 2.0)

    @staticmethod
    def factor(net):
        return net.values[0]


@case
class ConfigObject(Changing):
    def prepare(self, net):
        net.config = SimpleNamespace(inner=SimpleNamespace(k=1.0))

    def change(self, net, value):
        net.config.inner.k = value

    @staticmethod
    def factor(net):
        return net.config.inner.k


@dataclass
class Options:
    k: float = 1.0


@case
class DataclassValue(Changing):
    def prepare(self, net):
        net.options = Options()

    def change(self, net, value):
        net.options.k = value

    @staticmethod
    def factor(net):
        return net.options.k


@case
class ArrayValue(Changing):
    def prepare(self, net):
        net.values = np.ones(3)

    def change(self, net, value):
        net.values[1] = value

    @staticmethod
    def factor(net):
        return float(net.values[1])


@case
class ArrayScalar(Changing):
    def prepare(self, net):
        net.k = np.float64(1)

    def change(self, net, value):
        net.k = np.float64(value)

    @staticmethod
    def factor(net):
        return float(net.k)


class Size(enum.Enum):
    SMALL = 1.0
    LARGE = 2.0
    HUGE = 3.0


@case
class EnumValue(Changing):
    def prepare(self, net):
        net.size = Size.SMALL

    def change(self, net, value):
        net.size = Size(value)

    @staticmethod
    def factor(net):
        return net.size.value


@case
class ClassAttribute(Changing):
    class Net(Factor):
        k = 1.0

    net_class = Net

    def change(self, net, value):
        type(net).k = value

    @staticmethod
    def factor(net):
        return net.k


@case
class PropertyValue(Changing):
    class Net(Factor):
        @property
        def k(self) -> float:
            return self.hidden["k"]

    net_class = Net

    def prepare(self, net):
        net.hidden = {"k": 1.0}

    def change(self, net, value):
        net.hidden["k"] = value

    @staticmethod
    def factor(net):
        return net.k


@case
class AllAttributes(Changing):
    def prepare(self, net):
        net.k = 1.0

    def change(self, net, value):
        net.k = value

    @staticmethod
    def factor(net):
        return vars(net)["k"]


@case
class TensorReplaced(Changing):
    def prepare(self, net):
        net.k = [torch.tensor(1.0)]

    def change(self, net, value):
        net.k = [torch.tensor(value)]

    @staticmethod
    def factor(net):
        return net.k[0]


# ---- functions


@case
class FunctionReplaced(Changing):
    def prepare(self, net):
        net.act = lambda: 1.0

    def change(self, net, value):
        net.act = {1.0: lambda: 1.0, 2.0: lambda: 2.0, 3.0: lambda: 3.0}[value]

    @staticmethod
    def factor(net):
        return net.act()


@case
class Closure(Changing):
    def prepare(self, net):
        k = 1.0

        def get() -> float:
            return k

        def put(value: float) -> None:
            nonlocal k
            k = value

        net.get, self.put = get, put

    def change(self, net, value):
        self.put(value)

    @staticmethod
    def factor(net):
        return net.get()


@case
class Partial(Changing):
    def prepare(self, net):
        net.get = functools.partial(lambda k: k["k"], {"k": 1.0})

    def change(self, net, value):
        net.get.args[0]["k"] = value

    @staticmethod
    def factor(net):
        return net.get()


@case
class Default(Changing):
    def prepare(self, net):
        net.get = lambda k=1.0: k

    def change(self, net, value):
        net.get.__defaults__ = (value,)

    @staticmethod
    def factor(net):
        return net.get()


@case
class MethodOfInstance(Changing):
    def prepare(self, net):
        net.get = Options(1.0).__class__

    def change(self, net, value):
        net.get = functools.partial(Options, value)

    @staticmethod
    def factor(net):
        return net.get().k


# ---- structure


class Blocks(Factor):
    """Opened blocks, of which some may go."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(6, 6), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.linear(x)) + x

    def __init__(self, model: Changing) -> None:
        super().__init__(model)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.acts = nn.ModuleDict({"first": nn.Tanh()})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for act in self.acts.values():
            x = act(x)
        return super().forward(x)

    def factor_of(self) -> Any:
        return 1.0


@case
class ChildReplaced(Changing):
    """By one without weights."""

    net_class = Blocks

    def change(self, net, value):
        net.blocks[1].act = {1.0: nn.Tanh(), 2.0: nn.ReLU(), 3.0: nn.Sigmoid()}[value]


@case
class ChildAdded(Changing):
    net_class = Blocks

    def change(self, net, value):
        net.acts = nn.ModuleDict({"first": nn.Tanh()})
        if value == 2:
            net.acts["second"] = nn.Softplus()
        elif value == 3:
            net.acts["first"] = nn.Sigmoid()


@case
class HookAdded(Changing):
    net_class = Blocks

    def change(self, net, value):
        net.blocks[0]._forward_hooks.clear()
        net.blocks[3]._forward_pre_hooks.clear()
        if value > 1:
            net.blocks[0].register_forward_hook(lambda module, args, out: out * value)
            net.blocks[3].register_forward_pre_hook(lambda module, args: (args[0] + value,))


@case
class ForwardReplaced(Changing):
    net_class = Blocks

    def change(self, net, value):
        block = net.blocks[2]
        vars(block).pop("forward", None)
        if value > 1:
            forward = block.forward
            block.forward = lambda x: forward(x) * value


@case
class OnlyDispatches(Changing):
    """The module whose attribute it is runs no operation of its own."""

    class Net(Blocks):
        depth = 4

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[: self.depth]:
                x = block(x)
            return self.head(x)

    net_class = Net

    def prepare(self, net):
        net.depth = 4

    def change(self, net, value):
        net.depth = 5 - int(value)


# ---- the LightningModule's own forward


class Own(Changing):
    """Its own forward is what its step calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x) * self.own()

    def own(self) -> Any:
        return self.k

    @staticmethod
    def factor(net):
        return 1.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)


@case
class OwnEpoch(Own):
    def own(self):
        return 1.0 + self.current_epoch * self.changes


@case
class OwnEpochByTrainer(Own):
    def own(self):
        return 1.0 + self.trainer.current_epoch * self.changes


@case
class OwnGlobalStep(Own):
    def own(self):
        return 1.0 + 0.1 * self.global_step * self.changes


@case
class OwnPrivate(Own):
    _k = 1.0

    def own(self):
        return self._k

    def change(self, net, value):
        self._k = value


@case
class OwnHyperparameter(Own):
    def __init__(self, k: float = 1.0):
        super().__init__()
        self.save_hyperparameters()

    def own(self):
        return self.hparams.k

    def change(self, net, value):
        self.hparams.k = value


@case
class OwnDispatches(Own):
    """It runs no operation of its own."""

    def __init__(self):
        super().__init__()
        self.repeats, self.act = 1, nn.Tanh()

    def forward(self, x):
        for _ in range(self.repeats):
            x = self.act(x)
        return self.net(x)

    def change(self, net, value):
        self.repeats = int(value)


def fit(cls: type[Changing], changes: bool = True, **trainer: Any) -> Script:
    def make() -> Changing:
        for kind in (cls, cls.net_class):
            if "k" in vars(kind) and isinstance(vars(kind)["k"], float):
                kind.k = 1.0  # as another run in this process has left it
        model = cls()
        model.changes = changes
        return model

    trainer = {"max_steps": 2 * BATCHES, "limit_val_batches": 0, **trainer}
    return Script(make, lambda: vectors(16 * BATCHES), trainer=trainer)


@dataclass
class All:
    """All cases in one process after the other; with those that change nothing."""

    make: Callable[[str, bool], Script]
    names: list[str]

    def __call__(self, strategy: Any, devices: int) -> dict[tuple[str, bool], Any]:
        runs = {}
        for name in self.names:
            for changes in (True, False) if devices == 1 else (True,):
                runs[name, changes] = self.make(name, changes)(strategy, devices)
        return runs


def compared(names: list[str], arguments: dict[str, Any]) -> None:
    script = All(lambda name, changes: fit(CASES[name], changes), names)
    [wanted] = run_ranks(1, script, "auto", 1, deadline=240)
    arguments = {"pipeline_parallel_size": 2, **arguments}
    found = run_ranks(2, script, arguments, 2, deadline=400)
    differences = {n: [distance(run[n, True], wanted[n, True]) for run in found] for n in names}
    effects = {n: distance(wanted[n, False], wanted[n, True]) for n in names}
    assert {n for n, effect in effects.items() if effect < 1e-6} == set()
    assert {n: d for n, d in differences.items() if max(d) > TOLERANCE} == {}


@pytest.mark.slow
def test_what_changes_between_batches_is_seen() -> None:
    compared(list(CASES), {})


def test_what_changes_between_batches_is_seen_by_stages_in_a_v() -> None:
    names = ["DictEntry", "Closure", "HookAdded", "OwnEpoch", "OnlyDispatches"]
    compared(names, {"schedule": "ZBVZeroBubble"})


# ---- state that a forward changes itself


class Counting(nn.Module):
    """Counts its calls, and multiplies by a number that depends on the count."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(6, 6), counts

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 + (self.count() if self.counts else 0) % 3)

    def count(self) -> int:
        raise NotImplementedError


class InDict(Counting):
    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        self.stats = {"n": 0}

    def count(self) -> int:
        self.stats["n"] += 1
        return self.stats["n"]


class InObject(Counting):
    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        self.state = SimpleNamespace(inner=SimpleNamespace(n=0))

    def count(self) -> int:
        self.state.inner.n += 1
        return self.state.inner.n


class InText(Counting):
    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        self.mode = "a"

    def count(self) -> int:
        self.mode = {"a": "bb", "bb": "ccc", "ccc": "a"}[self.mode]
        return len(self.mode)


class InTuple(Counting):
    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        self.seen: tuple[int, ...] = ()

    def count(self) -> int:
        self.seen = (*self.seen, 1)
        return len(self.seen)


class InClass(Counting):
    n = 0

    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        type(self).n = 0

    def count(self) -> int:
        type(self).n += 1
        return self.n


class InClosure(Counting):
    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        n = 0

        def count() -> int:
            nonlocal n
            n += 1
            return n

        self.count = count


class InGenerator(Counting):
    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        self.rng = np.random.default_rng(0)

    def count(self) -> int:
        return int(self.rng.integers(1, 4))


class FromGenerators(Counting):
    """Operations and a module draw from one generator of torch."""

    class Noise(nn.Module):
        def __init__(self, source: torch.Generator) -> None:
            super().__init__()
            self.source = [source]

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand((), generator=self.source[0], dtype=x.dtype)

    def __init__(self, counts: bool) -> None:
        super().__init__(counts)
        self.source = torch.Generator()
        self.noise = self.Noise(self.source)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.counts:
            x = self.noise(x * torch.rand((), generator=self.source, dtype=x.dtype))
            x = x + torch.rand((), generator=self.source, dtype=x.dtype)
        return x


class Seeding(Counting):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.counts:
            with torch.random.fork_rng():
                torch.manual_seed(1)
                x = x + torch.rand((), dtype=x.dtype) + torch.rand_like(x[:1, :1])
        return x


STATEFUL = {
    kind.__name__: kind
    for kind in (
        *(InDict, InObject, InText, InTuple, InClass, InClosure, InGenerator),
        *(FromGenerators, Seeding),
    )
}


class Stateful(Perceptron):
    def __init__(self, kind: type[Counting], counts: bool) -> None:
        super().__init__()
        first, last = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
        self.net = nn.Sequential(first, kind(counts), nn.Linear(6, 6), nn.Tanh(), last)


def stateful(name: str, counts: bool, microbatches: int) -> Script:
    """A run on batches of 16, or on each of their microbatches, accumulated."""
    trainer = {"max_steps": 4, "limit_val_batches": 0, "accumulate_grad_batches": microbatches}
    return Script(
        lambda: Stateful(STATEFUL[name], counts),
        lambda: vectors(16 * BATCHES),
        batch_size=16 // microbatches,
        trainer=trainer,
    )


def test_state_that_a_forward_changes_is_that_of_one_device() -> None:
    names = list(STATEFUL)
    accumulated = All(lambda name, counts: stateful(name, counts, 8), names)
    [wanted] = run_ranks(1, accumulated, "auto", 1, deadline=120)
    script = All(lambda name, counts: stateful(name, counts, 1), names)
    arguments = {"pipeline_parallel_size": 2, "num_microbatches": 8}
    found = run_ranks(2, script, arguments, 2, deadline=240)
    differences = {n: [distance(run[n, True], wanted[n, True]) for run in found] for n in names}
    effects = {n: distance(wanted[n, False], wanted[n, True]) for n in names}
    assert {n for n, effect in effects.items() if effect < 1e-6} == set()
    assert {n: d for n, d in differences.items() if max(d) > TOLERANCE} == {}


# ---- what is refused


class ReplacesWeights(Changing):
    net_class = Blocks

    def change(self, net, value):
        if value == 2:
            net.blocks[1] = Blocks.Block()


class DiffersByRank(Number):
    def change(self, net, value):
        net.k = value + (self.trainer.global_rank if value == 2 else 0)


class ChangesInStep(Number):
    changes = False

    def training_step(self, batch, batch_idx):
        self.net.k = 1.0 + batch_idx
        return super().training_step(batch, batch_idx)


class SharesGenerator(Changing):
    """Two nets, called one after the other, draw from one generator."""

    class Noisy(nn.Module):
        def __init__(self, source: torch.Generator) -> None:
            super().__init__()
            self.linear, self.source = nn.Linear(6, 6), source

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.rand((), generator=self.source, dtype=x.dtype)

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator()
        self.first, self.second = self.Noisy(source), self.Noisy(source)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.second(self.first(x))[:, :3], y)


REFUSED = {
    SharesGenerator: "self.first on stage 0 and self.second on stage 1 draw from one generator",
    ReplacesWeights: "self.net.blocks.1.linear.weight is not the parameter that was placed",
    DiffersByRank: "on this rank was self.net.k. Set them to the same on all ranks",
    ChangesInStep: "self.net.k is 2.0, but was 1.0 when the batch began",
}


@pytest.mark.parametrize("model", REFUSED)
def test_refused(model: type[Changing]) -> None:
    with pytest.raises(RankFailed, match=REFUSED[model]) as caught:
        fit(model).pipelined(2, deadline=30)
    assert len(str(caught.value).split("\nrank 1: ")) == 2, "a rank hung or died without a word"


def test_a_plan_for_each_batch_is_warned_of() -> None:
    def warnings_of(trainer: Any, module: Any) -> list[str]:
        return module.warned

    def watch(module: Any) -> None:
        from lightning_pipeline import plans

        module.warned = []
        plans.rank_zero_warn = module.warned.append

    script = fit(OwnGlobalStep)
    script.setup, script.after = watch, warnings_of
    for run in script.pipelined(2):
        [text] = run.extra
        assert "8 batches in a row, because a forward reads self.global_step" in text
