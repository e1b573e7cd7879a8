"""What a blueprint says of stages is what their modules really do and keep."""

from __future__ import annotations

import time
from collections.abc import Callable

import lightning as L
import pytest
import torch
from lightning_pipeline.examples.text import GPT, Block
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipeline.errors import StepError
from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.splitting import CPU_RATES
from lightning_pipeline.splitting.torch_private import storage_of

Batch = tuple[Tensor, Tensor]
HOST = torch.device("cpu")


class MLP(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Text(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(50, 32), *(Block(32, 4, 0.1) for _ in range(4)))
        self.head = nn.Linear(32, 50)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.head(self.net(batch[0]))
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Reading(MLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


def vectors(rows: int) -> Batch:
    return torch.randn(rows, 32), torch.randn(rows, 32)


def tokens(rows: int) -> Batch:
    codes = torch.randint(0, 50, (rows, 12))
    return codes, codes


MODELS: list[tuple[type[L.LightningModule], Callable[[int], Batch]]] = [
    (MLP, vectors),
    (Text, tokens),
]


def blueprint(
    module: L.LightningModule, batch: Batch, counts: tuple[int, int] = (1, 8)
) -> Blueprint:
    return Blueprint(module, batch, len(batch[0]), counts, 4, CPU_RATES, {})


def really_saved(module: L.LightningModule, batch: Batch) -> int:
    """Bytes that autograd saves in a step, weights and the batch aside."""
    known = {storage_of(p) for p in module.parameters()} | set(map(storage_of, batch))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = module.training_step(batch, 0)
    assert loss.requires_grad
    sizes = {storage_of(t): t.untyped_storage().nbytes() for t in kept}
    return sum(size for storage, size in sizes.items() if storage not in known)


@pytest.mark.parametrize(("model", "make"), MODELS)
@pytest.mark.parametrize("rows", [2, 4, 16])
def test_one_stage_saves_what_autograd_saves(
    model: type[L.LightningModule], make: Callable[[int], Batch], rows: int
) -> None:
    module = model()
    module._trainer = None
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    [load] = blueprint(module, make(16)).cut(1).loads(rows)
    assert load.saved == pytest.approx(really_saved(module, make(rows)), rel=0.02)


@pytest.mark.parametrize(("model", "make"), MODELS)
def test_stages_together_do_what_the_whole_does(
    model: type[L.LightningModule], make: Callable[[int], Batch]
) -> None:
    found = blueprint(model(), make(16))
    [whole], parts = found.cut(1).loads(4), found.cut(4).loads(4)
    for name in ("forward", "backward", "weight"):
        assert sum(getattr(p, name).flops for p in parts) == getattr(whole, name).flops
    assert sum(part.saved for part in parts) >= whole.saved
    assert parts[0].received == 0 and all(part.received > 0 for part in parts[1:])


@pytest.mark.parametrize(("model", "make"), MODELS)
def test_between_two_sizes_all_is_a_straight_line(
    model: type[L.LightningModule], make: Callable[[int], Batch]
) -> None:
    module = model()
    wide, exact = blueprint(module, make(16), (1, 16)), blueprint(module, make(6), (1, 1))
    for guessed, seen in zip(wide.cut(2).loads(6), exact.cut(2).loads(6), strict=True):
        assert guessed.saved == pytest.approx(seen.saved, rel=1e-6)
        assert guessed.forward.flops == pytest.approx(seen.forward.flops, rel=1e-6)
        assert guessed.received == pytest.approx(seen.received, rel=1e-6)


def test_products_cost_twice_as_much_backward_half_of_it_for_weights() -> None:
    [load] = blueprint(MLP(), vectors(8)).cut(1).loads(8)
    products = 8 * 2 * 8 * 32 * 32
    assert load.forward.flops == products
    # The first layer's input needs no gradient.
    assert load.backward.flops == 2 * products - products / 8
    assert load.weight.flops == products


def test_states_are_those_of_the_holders() -> None:
    module = GPT(depth=2, width=16, heads=2, block_size=8)
    batch = torch.randint(0, 128, (4, 8)), torch.randint(0, 128, (4, 8))
    sizes = {name: 8 * p.numel() for name, p in module.named_parameters()}
    states = Blueprint(module, batch, 4, (1, 4), 2, CPU_RATES, sizes).cut(2).states
    tied = module.tokens.weight.numel()  # on both stages
    total = sum(p.numel() for p in module.parameters())
    assert sum(state.parameters for state in states) == total + tied
    assert sum(state.gradients for state in states) == 4 * (total + tied)
    assert sum(state.optimizer for state in states) == 8 * (total + tied)


def test_a_module_is_as_before() -> None:
    module, batch = Text(), tokens(4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    blueprint(module, batch).cut(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert "training_step" not in vars(module)


def test_a_step_that_reads_values_is_refused_with_the_reason() -> None:
    with pytest.raises(StepError, match=r"cannot be followed without values.*loss\.item\(\)"):
        blueprint(Reading(), vectors(4))


class Sleepy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


class Uneven(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net[0][0] = Sleepy(32, 32)


def test_measured_times_take_the_place_of_work_and_move_the_cut() -> None:
    made = [
        Blueprint(Uneven(), vectors(8), 8, (1, 8), 4, CPU_RATES, {}, measured_on=device)
        for device in (None, HOST)
    ]
    by_cost, by_time = (each.cut(2).loads(4) for each in made)
    assert by_cost[0].forward.seconds(CPU_RATES) < 0.005
    assert 0.01 <= by_time[0].forward.seconds(CPU_RATES) < 0.1
    assert by_time[0].backward.seconds(CPU_RATES) < 0.01
    assert made[1].cut(2).plan.stage_names[0] != made[0].cut(2).plan.stage_names[0]
    # What is kept in memory follows from the cut, not from the clock.
    assert by_time[1].deferred > 0 and 0 < by_time[1].weight.seconds(CPU_RATES) < 0.01


class Plain(L.LightningModule):
    """Calls its layers one by one, so that none is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Sleepy(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.mse_loss(self.last(self.second(self.first(batch[0]))), batch[1])


def test_calls_that_are_not_cut_are_measured_too() -> None:
    made = Blueprint(Plain(), vectors(8), 8, (1, 8), 2, CPU_RATES, {}, measured_on=HOST)
    first, last = made.cut(2).loads(4)
    assert 0.01 <= first.forward.seconds(CPU_RATES) < 0.1
    assert last.forward.seconds(CPU_RATES) < 0.01
    assert made.cut(2).plan.stage_names[0] == ["first"]


class Moody(nn.Linear):
    """Does not like the values that are made up."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and bool((x == 1).all()):
            raise RuntimeError("not this")
        return super().forward(x)


def test_what_does_not_run_keeps_its_cost_in_proportion() -> None:
    class Mixed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.last = Moody(32, 32)

    made = Blueprint(Mixed(), vectors(8), 8, (8, 8), 1, CPU_RATES, {}, measured_on=HOST)
    plain = Blueprint(Mixed(), vectors(8), 8, (8, 8), 1, CPU_RATES, {})
    calls, costs = made.cut(1).plan.calls, [call.cost[0] for call in plain.cut(1).plan.calls]
    first, second, last = (call.cost[0] for call in calls)
    assert last == pytest.approx(costs[2] * (first + second) / (costs[0] + costs[1]))
