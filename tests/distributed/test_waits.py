"""A step reads nothing of what its device computes: on a GPU each reading waits for the launches.

Here the device is the host, which the code is told not to know: what is on a device must then be
read in the ways of `transfers` alone, and any other reading or copy is noted by torch's dispatcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from lightning_pipeline import transfers
from tests.distributed.fits import Run, Script, distance
from tests.distributed.ranks import RankFailed
from tests.distributed.test_data import DRAWN_APART, fed, feeds
from tests.distributed.test_exactness import TOLERANCE, images, tokens, vectors
from tests.models.modules import ImageClassifier, LanguageModel, Perceptron

READS = {
    "_local_scalar_dense",  # item, bool, float, int, and an index that is a tensor
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "lift_fresh",  # torch.tensor and x[0] = 1.0: copies from the host
}
CALLS = ("tolist", "numpy", "cpu", "item", "__array__")
# Of numbers that are on the host anyway, and of those that have come from the device.
ON_HOST = {
    ("batch.py", "checksum_of_samples"),
    ("gradients.py", "_divisor"),
    ("loaders.py", "_gather"),
    ("loaders.py", "require"),
    ("loaders.py", "require_values"),
    ("logs.py", "_tell"),
    ("passes.py", "check_fingerprints"),
    ("passes.py", "settle"),
    ("transfers.py", "placed"),
}
STEPS = 8


def caller() -> tuple[str, str, int]:
    """File, function and line of the code outside of torch that runs now."""
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename.rsplit("/", 1)[-1], frame.f_code.co_name, frame.f_lineno


class Watch(TorchDispatchMode):
    """Notes operations that a device waits in."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name in READS or masks) and caller()[:2] not in ON_HOST:
            self.found.append(f"{name} at {caller()}")
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Notes methods that read, of which the host's own tensors tell no dispatcher."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in CALLS and caller()[:2] not in ON_HOST:
            self.found.append(f"{name} at {caller()}")
        return func(*args, **(kwargs or {}))


class Watcher(L.Callback):
    """Watches the batches in which hooks are not compared either."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.watched = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.stack = ExitStack()
        if batch_idx in (3, 5, 6):
            self.watched += 1
            self.stack.enter_context(Watch(self.found))
            self.stack.enter_context(Calls(self.found))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.stack.close()


class Weighted(Perceptron):
    """Gives a weight, which it computes, and logs numbers of the host and of the device."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        count = (y > 0).sum()
        loss = (F.mse_loss(self.net(x), y, reduction="none") * (y > 0)).sum() / count
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rate", 0.1 + batch_idx)
        self.log("largest", x.max(), reduce_fx="max", batch_size=len(x))
        return {"loss": loss, "weight": count}


class Measured(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("mean", self.mean(loss))
        return loss


class OnDevice:
    """A script that takes the host for a device."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __call__(self, *arguments: Any) -> Run:
        transfers.is_host = lambda device: False  # of this process alone
        return self.script(*arguments)


def on_device(
    script: Script, ranks: int, replicas: int = 1, deadline: float = 60, **arguments: Any
) -> list[Run]:
    """The script's runs on a pipeline of devices."""
    from tests.distributed.ranks import run_ranks

    world, arguments = ranks * replicas, {"pipeline_parallel_size": ranks, **arguments}
    return run_ranks(world, OnDevice(script), arguments, world, deadline=deadline)


def found(trainer: L.Trainer, module: L.LightningModule) -> tuple[int, list[str]]:
    [watcher] = [c for c in trainer.callbacks if isinstance(c, Watcher)]
    return watcher.watched, watcher.found


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "mlp": (Perceptron, vectors, {}),
    "cnn, clipped": (ImageClassifier, images, {"gradient_clip_val": 1.0}),
    "transformer": (partial(LanguageModel, depth=2), tokens, {}),
    "weighted": (Weighted, vectors, {}),
    "metric": (Measured, vectors, {}),
    "accumulated": (Weighted, vectors, {"accumulate_grad_batches": 2}),
}
LAYOUTS = {"pp2": (2, 1), "pp2xdp2": (2, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_devices_waits_for_nothing_and_is_exact(case, schedule, layout):
    model, dataset, trainer = CASES[case]
    ranks, replicas = LAYOUTS[layout]

    def script(callbacks, **rest):
        trainer_of = {**trainer, "max_steps": STEPS, "limit_val_batches": 0, **callbacks}
        return Script(model, lambda: dataset(16 * STEPS * 2), trainer=trainer_of, **rest)

    expected = script({}).plain(replicas)
    watched = script({"callbacks": [Watcher()]}, after=found)
    for run in on_device(watched, ranks, replicas, schedule=schedule):
        assert run.extra == (3, [])
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.parametrize("case", DRAWN_APART)
def test_ranks_that_draw_apart_are_told_behind_the_launches(case):
    script = feeds(lambda: fed(DRAWN_APART[case]()), limit_val_batches=0)
    message = r"rank 1 and rank 0 of one pipeline got different batches.*workers=True.*augmentation"
    with pytest.raises(RankFailed, match=message):
        on_device(script, 2, deadline=30)
