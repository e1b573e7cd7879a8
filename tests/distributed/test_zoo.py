"""Every model of the zoo over real ranks: trained, validated and at other shapes as on one device.

A model whose samples are independent of each other is compared with whole batches on one device.
Any other sees what a microbatch holds, and is compared with its microbatches one by one, as
``accumulate_grad_batches`` takes them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import lightning_pipeline  # noqa: F401  registers the strategy
from tests.distributed.fits import Run, Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.models import transformers_models
from tests.models.registry import LAYOUTS
from tests.models.stepped import MICROBATCHES, Stepped, loaders
from tests.models.zoo import ZOO

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


@dataclass
class Fed(Script):
    """A script whose data are loaders."""

    def loader(self, training: Any) -> Any:
        return training

    def validation_loader(self, validation: Any) -> Any:
        return validation


def script(name: str, whole: bool = True, **trainer: Any) -> Script:
    model = ZOO[name]

    def shares(trainer: Any, module: Any) -> list[float] | None:
        plan = getattr(trainer.strategy, "plan", None)
        return plan and [stage.share for stage in plan.stages]

    return Fed(
        lambda: Stepped(model),
        lambda: loaders(model, whole),  # type: ignore[arg-type, return-value]
        trainer={"max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0, **trainer},
        after=shares,
        dtype=model.dtype,
    )


@functools.cache
def one_device(name: str) -> Run:
    if ZOO[name].separable:
        return script(name).plain()
    return script(name, whole=False, accumulate_grad_batches=MICROBATCHES).plain()


@functools.cache
def start(name: str) -> Run:
    module = Stepped(ZOO[name])
    return Run({key: tensor.clone() for key, tensor in module.state_dict().items()}, {})


CASES = [
    (name, num_stages) for name, model in ZOO.items() if not model.refusal for num_stages in LAYOUTS
]


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_model_equals_one_device(name: str, num_stages: int) -> None:
    model, (ranks, schedule) = ZOO[name], LAYOUTS[num_stages]
    tolerance = TOLERANCE[model.dtype]
    of_losses = TOLERANCE[model.loss_dtype or model.dtype]
    before, expected = start(name), one_device(name)
    assert distance(before, expected) > 1e-3  # there is something to compare
    runs = script(name).pipelined(ranks, schedule=schedule, num_microbatches=MICROBATCHES)
    for run in runs:
        assert run.metrics == pytest.approx(expected.metrics, rel=of_losses, abs=of_losses)
        assert distance(run, expected) <= tolerance
        assert sum(share > 0 for share in run.extra) == num_stages, run.extra


@pytest.mark.parametrize("name", [name for name, model in ZOO.items() if model.refusal])
def test_model_is_refused(name: str) -> None:
    with pytest.raises(RankFailed, match=re.escape(ZOO[name].refusal)):
        script(name).pipelined(2, schedule="GPipe", num_microbatches=MICROBATCHES)


@functools.cache
def finetuned(encoding: type) -> Script:
    def batches(seeds: range) -> DataLoader:
        found: Any = [encoding(transformers_models.answers(seed)) for seed in seeds]
        return DataLoader(found, batch_size=None, collate_fn=lambda batch: batch)

    return Fed(
        transformers_models.Finetuning,
        lambda: (batches(range(4)), batches(range(4, 5))),  # type: ignore[arg-type, return-value]
        trainer={"max_epochs": 1, "num_sanity_val_steps": 0},
    )


@pytest.mark.parametrize("encoding", [dict, BatchEncoding])
def test_batches_of_hugging_face(encoding: type) -> None:
    """A model's own loss, labels of -100 and masks, under the registered name."""
    expected = finetuned(dict).plain()
    for run in run_ranks(2, finetuned(encoding), "pipeline", 2):
        assert distance(run, expected) <= 1e-10
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-6)
