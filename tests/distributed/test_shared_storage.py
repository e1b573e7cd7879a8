"""Values of one storage over a boundary, buffers that backwards need, casts of weights."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import vectors

WIDTH = 8


class Model(L.LightningModule):
    def __init__(self, *middle) -> None:
        super().__init__()
        ends = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.net = nn.Sequential(ends[0], nn.Tanh(), *middle, nn.Tanh(), ends[1])

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class WritesLate(nn.Module):
    """Cut inside: a view is written to behind the cut, and its base is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        base = x * 1
        view, z = base[:, :4], base.detach() * 1
        for layer in self.layers:
            z = layer(z).tanh()
        view.mul_(2.0)
        return z + base


FLAGS = {"limit_val_batches": 0}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_write_to_a_view_is_one_to_its_base(schedule):
    script = Script(lambda: Model(WritesLate()), lambda: vectors(96), 16, FLAGS)
    plain = script.plain()
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class Averaged(nn.Module):
    """Multiplies by a moving average that each forward writes to."""

    def __init__(self, data) -> None:
        super().__init__()
        self.layer, self.data = nn.Linear(WIDTH, WIDTH), data
        self.register_buffer("mean", torch.zeros(1, WIDTH))

    def forward(self, x):
        if self.training:
            mean = self.mean.data if self.data else self.mean
            mean.mul_(0.5).add_(0.5 * x.detach().mean(0, keepdim=True))
        return self.layer(x) * self.mean


@pytest.mark.parametrize("data", [True, False], ids=["by data", "in place"])
def test_a_buffer_that_a_backward_needs_is_that_of_its_microbatch(data):
    make = partial(Model, Averaged(data).double(), nn.Tanh(), Averaged(data).double())
    accumulating = {**FLAGS, "accumulate_grad_batches": 4}
    plain = Script(make, lambda: vectors(96), 4, accumulating).plain()
    for run in Script(make, lambda: vectors(96), 16, FLAGS).pipelined(2, num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)

    def forward(self, x):
        return x + self.table((x.detach()[:, :3] * 5).abs().long() % 7).mean(1)


def test_sparse_gradients_of_replicas_are_refused_with_the_cure():
    script = Script(lambda: Model(Looked()), lambda: vectors(192), 16, FLAGS)
    with pytest.raises(RankFailed, match="Set sparse=False, or data_parallel_size=1"):
        script.pipelined(2, 2, num_microbatches=4)


def test_sparse_gradients_equal_one_device():
    script = Script(lambda: Model(Looked()), lambda: vectors(96), 16, FLAGS)
    plain = script.plain()
    for run in script.pipelined(2, schedule="ZBVZeroBubble", num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class Rounded(nn.Module):
    """A weight that a step rounds to 16 bits, as quantisation-aware training does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x):
        return x @ self.weight.to(torch.bfloat16).to(x.dtype)


class Spectrum(nn.Module):
    """A real weight on complex numbers, as Fourier layers have it."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // 2 + 1
        self.weight = nn.Parameter(torch.randn(size, size) * 0.3)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight.to(torch.complex128), n=WIDTH)


@pytest.mark.parametrize("kind", [Spectrum, Rounded], ids=lambda kind: kind.__name__)
def test_weights_that_are_cast_equal_one_device(kind):
    exact = {"limit_val_batches": 0, "max_steps": 2}
    script = Script(lambda: Model(kind(), nn.Tanh(), kind()), lambda: vectors(96), 16, exact)
    if kind is Rounded:  # rounded once for each microbatch on one device, too
        accumulating = {**exact, "accumulate_grad_batches": 4}
        plain = Script(script.model, script.dataset, 4, accumulating).plain()
    else:
        plain = script.plain()
    for run in script.pipelined(2, schedule="ZBVZeroBubble", num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class Adding(torch.autograd.Function):
    """Adds a gradient of its own to what comes back, as penalties on activations do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 1e-2 * ctx.saved_tensors[0]


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Adding.apply(self.layer(x))


def test_microbatches_that_fill_a_schedule_up_add_no_gradient():
    script = Script(lambda: Model(Penalised()), lambda: vectors(12), 2, FLAGS)
    plain = script.plain()
    for run in script.pipelined(2, schedule="DualPipeV", num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class Moving(nn.Module):
    """Stays whole, and moves an average of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(1, WIDTH))

    def forward(self, x):
        x.sum().item()
        y = self.layer(x)
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * y.detach().mean(0, keepdim=True))
        return y


class Follows(nn.Module):
    """Multiplies by the average that another module moves."""

    def __init__(self, moving) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", moving.mean)

    def forward(self, x):
        return self.layer(x) * self.mean


class SharesBuffer(Model):
    def __init__(self) -> None:
        moving = Moving()
        super().__init__(nn.Sequential(moving, nn.Tanh(), Follows(moving)))


class SharesBufferBetweenCalls(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moving = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh()), Moving()
        self.follows, self.head = Follows(self.moving), nn.Linear(WIDTH, 3)

    def training_step(self, batch, batch_idx):
        h = self.moving(self.first(batch[0])).tanh()
        return F.mse_loss(self.head(self.follows(h).tanh()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


@pytest.mark.parametrize(
    ("make", "how"),
    [(SharesBuffer, {}), (SharesBufferBetweenCalls, {"partition": ["moving"]})],
    ids=["one call", "two calls"],
)
def test_a_buffer_of_two_modules_is_one(make, how):
    accumulating = {**FLAGS, "accumulate_grad_batches": 4}
    plain = Script(make, lambda: vectors(96), 4, accumulating).plain()
    script = Script(make, lambda: vectors(96), 16, FLAGS)
    for run in script.pipelined(2, schedule="GPipe", num_microbatches=4, **how):
        assert distance(run, plain) <= 1e-12


class Aliased(nn.Module):
    """Writes to a buffer and reads a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("both", torch.ones(2, WIDTH))
        self.register_buffer("first", self.both[0])

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            self.both.mul_(0.5).add_(y.detach().abs().mean(0))
        return y + self.first


def test_a_view_of_a_buffer_sees_what_is_written_to_it():
    accumulating = {**FLAGS, "accumulate_grad_batches": 4}
    plain = Script(lambda: Model(Aliased()), lambda: vectors(96), 4, accumulating).plain()
    script = Script(lambda: Model(Aliased()), lambda: vectors(96), 16, FLAGS)
    for run in script.pipelined(2, num_microbatches=4):
        assert distance(run, plain) <= 1e-12


class Listened(Model):
    """Halves a gradient at the node that accumulates it, which it keeps from the beginning."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))
        weight = self.net[2].weight
        self.kept = [weight.view_as(weight).grad_fn.next_functions[0][0]]
        self.kept[0].register_prehook(lambda grads: (grads[0] / 2,))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_hook_at_the_accumulation_of_a_weight_is_run(schedule):
    script = Script(Listened, lambda: vectors(96), 16, FLAGS)
    plain = script.plain()
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        assert distance(run, plain) <= 1e-12
