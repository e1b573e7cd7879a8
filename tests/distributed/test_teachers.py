"""Averaged copies of a trained module, updated in hooks as users write them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.several import Base, mlp

RATE = 0.9


class MeanTeacher(Base):
    """The teacher runs in the step; the hook moves it to the student, pair by pair."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(6, 8, 8, 8, 3)
        self.teacher = copy.deepcopy(self.student)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False

    def loss(self, x, y):
        out = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x.flip(1))
        return F.mse_loss(out, y) + 0.5 * F.mse_loss(out, wanted)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.lerp_(p, 1 - RATE)


class MultipliesAndAdds(MeanTeacher):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.data.mul_(RATE).add_(p.data, alpha=1 - RATE)


class BindsData(MeanTeacher):
    """As in MoCo."""

    def on_before_zero_grad(self, optimizer):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.data = q.data * RATE + p.data * (1.0 - RATE)


class Lists(MeanTeacher):
    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch._foreach_lerp_(
            list(self.teacher.parameters()), list(self.student.parameters()), 1 - RATE
        )


class OnlyValidates(MeanTeacher):
    """The teacher is no part of the training step."""

    def loss(self, x, y):
        return F.mse_loss((self.student if self.training else self.teacher)(x), y)


class NeverRuns(MeanTeacher):
    """Not before a test; every other step it starts again from the student."""

    def loss(self, x, y):
        return F.mse_loss(self.student(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 2:
            self.teacher.load_state_dict(self.student.state_dict())


class Averaged(NeverRuns):
    """torch's own."""

    def __init__(self) -> None:
        super().__init__()
        del self.teacher
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.student, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(RATE)
        )

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema.update_parameters(self.student)


class Target(Base):
    """BYOL's: two modules, each with its copy; BatchNorm's buffers are averaged, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = mlp(6, 8, 8, norm=True), mlp(8, 8, 8, norm=True)
        self.predictor = mlp(8, 6, 8)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def loss(self, x, y):
        a, b = x, x.flip(1)
        online = [self.predictor(self.projector(self.encoder(view))) for view in (a, b)]
        with torch.no_grad():
            targets = [self.target_projector(self.target_encoder(view)) for view in (b, a)]
        return sum(F.mse_loss(p, t) for p, t in zip(online, targets, strict=True))

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for name in ("encoder", "projector"):
                online, target = getattr(self, name), getattr(self, f"target_{name}")
                for p, q in zip(online.parameters(), target.parameters(), strict=True):
                    q.mul_(RATE).add_((1 - RATE) * p)
                for p, q in zip(online.buffers(), target.buffers(), strict=True):
                    q.copy_(p)


class Chained(MeanTeacher):
    """The teacher runs on what the student made, so that they cannot be woven."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def loss(self, x, y):
        out = self.student(x)
        return F.mse_loss(self.teacher(out)[:, :3], y)


def saved(trainer, module):
    """The weights of the checkpoint, on the rank that writes it."""
    trainer.save_checkpoint("teacher.ckpt")
    trainer.strategy.barrier()
    return torch.load("teacher.ckpt", weights_only=False)["state_dict"]


class Saving(Script):
    """Runs once for each of several strategies, and takes a checkpoint of the spread module."""

    def __call__(self, strategies, devices):
        return [super(Saving, self).__call__(strategy, devices) for strategy in strategies]


MODELS = {
    "lerp": MeanTeacher,
    "multiply and add": MultipliesAndAdds,
    "data": BindsData,
    "foreach": Lists,
    "validation alone": OnlyValidates,
    "never called": NeverRuns,
    "AveragedModel": Averaged,
    "with BatchNorm": Target,
    "chained": Chained,
}


def script(model, microbatches=1):
    """The reference of a model with BatchNorm accumulates the microbatches."""
    alone = microbatches > 1 and model is Target
    trainer = {"limit_val_batches": 1, "accumulate_grad_batches": microbatches if alone else 1}
    size = 16 // microbatches if alone else 16
    return Saving(model, lambda: vectors(48), size, trainer, after=saved)


@pytest.mark.parametrize("case", MODELS)
def test_the_copy_follows_as_on_one_device(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [expected] = run_ranks(1, script(MODELS[case], 4), ["auto"], 1)[0]
    strategies = [
        {"schedule": name, "num_microbatches": 4} for name in ("1F1B", "InterleavedZeroBubble")
    ]
    for runs in run_ranks(2, script(MODELS[case]), strategies, 2):
        for run in runs:
            assert distance(run, expected) <= TOLERANCE
            if MODELS[case] is not Target:
                assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
            assert list(run.extra) == list(expected.extra)
            for name, tensor in expected.extra.items():
                torch.testing.assert_close(run.extra[name], tensor, rtol=1e-12, atol=1e-14)


class Unlike(MeanTeacher):
    """A copy of another structure, which nothing tells from any other module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Tanh(), *copy.deepcopy(self.student))

    def loss(self, x, y):
        return F.mse_loss(self.student(x), y)


def test_a_copy_on_other_stages_is_refused():
    message = r"(?s)'lerp_' brings together '(student|teacher)\.\d.*which is on stage.*deepcopy"
    refused = Script(Unlike, lambda: vectors(32), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed, match=message):
        refused.pipelined(2, deadline=30)
