"""Loss scaling and clipping over stages."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from lightning_pipeline import wire
from lightning_pipeline.refusals import check_precision
from tests.distributed.fits import Script, classes, distance, rows
from tests.distributed.ranks import RankFailed
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models.modules import (
    FrozenPrefix,
    ImageClassifier,
    LanguageModel,
    Perceptron,
    WeightedLoss,
)


class Overflows(Perceptron):
    """Its loss is infinite on one batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.scale * self.net(x), y)
        return loss * float("inf") if batch_idx == 2 else loss


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 2), ("ZBVZeroBubble", 2), ("GPipe", 4)])
def test_all_ranks_skip_the_same_steps(schedule, ranks):
    """Autocast leaves float64 alone, so what remains of 16-bit training is the loss scaling."""

    def make():
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        return Script(
            Overflows,
            lambda: vectors(96),
            trainer={"limit_val_batches": 0, "plugins": [plugin]},
            after=lambda trainer, module: trainer.precision_plugin.scaler.get_scale(),
        )

    expected = make().plain()
    assert expected.extra == 2.0**15
    for run in make().pipelined(ranks, schedule=schedule):
        assert run.extra == expected.extra
        assert distance(run, expected) <= TOLERANCE


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(
    ("model", "schedule", "ranks", "replicas"),
    [
        (Perceptron, "1F1B", 2, 1),
        (WeightedLoss, "ZBVZeroBubble", 2, 1),
        (Perceptron, "Interleaved1F1B", 2, 2),
        (Perceptron, "GPipe", 4, 1),
    ],
)
def test_clipping_sees_the_whole_gradient(model, schedule, ranks, replicas, algorithm):
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    script = Script(model, lambda: vectors(96 * replicas), trainer={"limit_val_batches": 0, **clip})
    expected = script.plain(replicas)
    unclipped = Script(model, lambda: vectors(96 * replicas), trainer={"limit_val_batches": 0})
    assert distance(unclipped.plain(replicas), expected) > 1e-4
    for run in script.pipelined(ranks, replicas, schedule=schedule):
        assert distance(run, expected) <= TOLERANCE


BY_VALUE = {"gradient_clip_algorithm": "value"}


class FrozenStage(FrozenPrefix):
    """One rank has no gradient at all."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class LimitsByHand(FrozenStage):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.02)


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


WITHOUT_GRADIENTS = {
    "by value": (FrozenStage, lambda: {"gradient_clip_val": 0.01, **BY_VALUE}),
    "by norm": (FrozenStage, lambda: {"gradient_clip_val": 0.02}),
    "by hand": (LimitsByHand, dict),
    "scaled": (FrozenStage, scaled),
    "scaled and by value": (
        FrozenStage,
        lambda: {**scaled(), "gradient_clip_val": 0.01, **BY_VALUE},
    ),
}


@pytest.mark.parametrize("case", WITHOUT_GRADIENTS)
def test_a_rank_without_gradients(case):
    model, flags = WITHOUT_GRADIENTS[case]

    def script():
        return Script(model, lambda: vectors(96), trainer={"limit_val_batches": 0, **flags()})

    expected = script().plain()
    for run in script().pipelined(2, partition=("net.7",)):
        assert distance(run, expected) <= TOLERANCE


class ClipsByHand(Perceptron):
    order = 2.0

    def on_before_optimizer_step(self, optimizer):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.02, self.order)
        self.log("norm", norm)
        part = torch.nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.01, self.order)
        self.log("part", part)


class ClipsByMaximum(ClipsByHand):
    order = float("inf")


class ClipsInHook(Perceptron):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, 0.02, "norm")


@pytest.mark.parametrize("model", [ClipsByHand, ClipsByMaximum, ClipsInHook])
@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 2), ("ZBVZeroBubble", 2), ("GPipe", 4)])
def test_clipping_by_hand_sees_the_whole_gradient(model, schedule, ranks):
    script = Script(model, lambda: vectors(96), trainer={"limit_val_batches": 0})
    expected = script.plain()
    for run in script.pipelined(ranks, schedule=schedule):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_norms_that_are_not_finite():
    class Infinite(Overflows):
        def configure_gradient_clipping(self, optimizer, **_):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)

    script = Script(Infinite, lambda: vectors(96), trainer={"limit_val_batches": 0})
    with pytest.raises(RankFailed, match=r"total norm of order 2.0 of the gradients of all stages"):
        script.pipelined(2, deadline=30)


def test_tied_weights_count_once_and_stay_equal():
    from tests.distributed.test_exactness import tokens

    clip = {"limit_val_batches": 0, "gradient_clip_val": 0.1, "max_steps": 50}

    def after(trainer, module):
        assert module.head.weight is module.token.weight
        return None

    script = Script(LanguageModel, lambda: tokens(96), trainer=clip, after=after)
    expected = script.plain()
    runs = script.pipelined(2)
    for run in runs:
        assert distance(run, expected) <= 1e-10  # 50 steps of AdamW
        assert torch.equal(run.state["token.weight"], runs[0].state["token.weight"])


MICROBATCHES = 4
DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def note_dtypes(module):
    """Collects the dtypes of the activations that reach or leave this rank."""
    module.seen = set()

    def noted(method):
        def wrapper(parcel, given):
            out = method(parcel, given)
            tensors = given if method.__name__ == "pack" else out
            # fingerprints have one dim
            module.seen |= {tensor.dtype for tensor in tensors if tensor.ndim > 1}
            return out

        return wrapper

    for name in ("pack", "unpack"):
        setattr(wire.Parcel, name, noted(getattr(wire.Parcel, name)))


def single_precision(kind):
    def make(count, seed):
        if kind == "vectors":
            return TensorDataset(
                rows(count, 6, seed=seed).float(), rows(count, 3, seed=seed + 1).float()
            )
        return TensorDataset(
            rows(count, 1, 8, 8, seed=seed).float(), classes(count, top=10, seed=seed)
        )

    return make(96, 1), make(20, 2)


KINDS = {"vectors": Perceptron, "images": ImageClassifier}


def in_precision(precision, kind, accumulated=1):
    flags = {"precision": precision}
    if precision == "16-mixed":  # on CPUs Lightning would take bfloat16
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        flags = {"plugins": [MixedPrecision(precision, "cpu", scaler=scaler)]}
    return Script(
        KINDS[kind],
        lambda: single_precision(kind),
        batch_size=16 // accumulated,
        trainer={"limit_val_batches": 0, "accumulate_grad_batches": accumulated, **flags},
        setup=note_dtypes,
        after=lambda trainer, module: module.seen,
        dtype=torch.float32,
    )


@functools.cache
def accumulated_reference(precision, kind):
    return in_precision(precision, kind, MICROBATCHES).plain()


CASES = [(p, "vectors", s) for p in DTYPES for s in ("1F1B", "ZBVZeroBubble")]
CASES += [(p, "images", "1F1B") for p in ("bf16-mixed", "16-mixed")]


@pytest.mark.parametrize(("precision", "kind", "schedule"), CASES)
def test_precision_equals_accumulated_microbatches(precision, kind, schedule):
    """To the last bit: a pipeline rounds as one device that accumulates its microbatches does."""
    expected = accumulated_reference(precision, kind)
    script = in_precision(precision, kind)
    for run in script.pipelined(2, schedule=schedule, num_microbatches=MICROBATCHES):
        assert distance(run, expected) == 0
        assert run.extra == {DTYPES[precision]}  # that of the activations between the stages
        assert all(tensor.isfinite().all() for tensor in run.state.values())


def test_precision_with_layers_of_its_own_is_refused():
    plugin = object.__new__(TransformerEnginePrecision)  # its library need not be installed
    script = Script(Perceptron, lambda: vectors(32), trainer={"plugins": [plugin]})
    message = "Precision: it replaces nn.Linear.*bf16-mixed"
    with pytest.raises(RankFailed, match=f"(?s)TransformerEngine{message}"):
        script.pipelined(2, deadline=30)
    with pytest.raises(MisconfigurationException, match=f"(?s)Bitsandbytes{message}"):
        check_precision(object.__new__(BitsandbytesPrecision))  # Lightning wants it on CUDA
