"""A pass of the engine over stages of one rank, and a Trainer on one device."""

from __future__ import annotations

from collections import Counter

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.engine import Engine
from lightning_pipeline.pipeline import Pipeline
from lightning_pipeline.schedules import SCHEDULES
from lightning_pipeline.steps import TensorMeta
from tests.distributed.test_exactness import vectors
from tests.gpu.devices import mesh_of, no_waits, on_each_device
from tests.models.modules import Perceptron

ROWS, WIDTH, MICROBATCHES = 3, 8, 4


class Layers:
    """Work of one layer a stage on some microbatches; see :class:`lightning_pipeline.engine.Work`.

    Args:
        num_stages: Number of stages, all on this rank.
        device: Where they are.
    """

    key, num_microbatches, trains = "layers", MICROBATCHES, True

    def __init__(self, num_stages: int, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(num_stages)]
        self.net = nn.Sequential(*layers).to(device)
        self.inputs = torch.randn(MICROBATCHES, ROWS, WIDTH, dtype=torch.float64).to(device)
        self.losses: dict[int, torch.Tensor] = {}
        self.complete: Counter[int] = Counter()

    def boundary(self, stage, microbatch):
        return [TensorMeta((ROWS, WIDTH), torch.float64, True)]

    def before_messages(self):
        raise AssertionError("one rank sends nothing")

    def forward(self, stage, microbatch, received):
        [x] = received or [self.inputs[microbatch]]
        y = self.net[stage](x).tanh()
        if stage < len(self.net) - 1:
            return (y,)
        self.losses[microbatch] = y.square().mean()
        return self.losses[microbatch]

    def loss_factor(self, microbatch):
        return 1 / MICROBATCHES

    def seconds(self, stage):
        return 1e-3

    def parameters(self, stage):
        return self.net[stage].parameters()

    def returned(self, stage, microbatch, gradients):
        assert all(grad is not None for grad in gradients)

    def finished(self, stage):
        self.complete[stage] += 1

    def plain(self) -> list[torch.Tensor]:
        """The gradients of one backward over all microbatches."""
        y = self.inputs.flatten(0, 1)
        for layer in self.net:
            y = layer(y).tanh()
        return list(torch.autograd.grad(y.square().mean(), list(self.net.parameters())))


@on_each_device
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.snake)
def test_a_steady_pass_waits_for_nothing(schedule, device, one_rank, monkeypatch):
    mesh = mesh_of(schedule.name, device)
    engine = Engine(mesh, schedule, mesh.stages_per_rank, device)
    work = Layers(mesh.num_stages, device)
    engine.run(work)  # makes the order, the gradients and what libraries set up once
    work.net.zero_grad(set_to_none=False)
    with no_waits(device, monkeypatch):
        engine.run(work)
    assert work.complete == dict.fromkeys(range(mesh.num_stages), 2)
    for parameter, expected in zip(work.net.parameters(), work.plain(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-14)


class Steps:
    """Lets no run of a step but the first three wait for the device."""

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        run, self.count = Pipeline.run, 0

        def watched(pipeline, step, *args, **kwargs):
            self.count += 1
            if self.count <= 3 or step != "training_step":
                return run(pipeline, step, *args, **kwargs)
            with no_waits(device, monkeypatch):
                return run(pipeline, step, *args, **kwargs)

        monkeypatch.setattr(Pipeline, "run", watched)


def fitted(device, strategy):
    L.seed_everything(1, verbose=False)
    module = Perceptron().double()
    training, validation = vectors(48)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        **quiet,
    )
    trainer.fit(module, DataLoader(training, 8), DataLoader(validation, 10))
    found = trainer.validate(module, DataLoader(validation, 10), verbose=False)
    state = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return state, trainer.callback_metrics, found


@pytest.fixture
def no_group():
    """Leaves no process group, which a strategy of one process sets up in this one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@on_each_device
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_trainer_on_one_device(schedule, device, no_group, monkeypatch):
    expected = fitted(device, "auto")
    steps = Steps(device, monkeypatch)
    strategy = PipelineStrategy(1, 1, schedule, num_microbatches=4)
    found = fitted(device, strategy)
    assert steps.count >= 12
    for name, tensor in expected[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-12, atol=1e-14)
    assert {k: float(v) for k, v in found[1].items()} == pytest.approx(
        {k: float(v) for k, v in expected[1].items()}, rel=1e-12
    )
    assert found[2] == [pytest.approx(metrics, rel=1e-12) for metrics in expected[2]]
