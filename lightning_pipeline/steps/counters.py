"""Numbers that a step changes outside the LightningModule: on submodules and on helpers.

Each microbatch would change them again, on the ranks alone that run the code, and nothing tells the
others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import is_same

_Place = tuple[str, str]  # dotted name of the module or helper, name of the attribute
_FOREIGN = frozenset(
    [
        "builtins",
        "lightning",
        "lightning_pipeline",
        "numpy",
        "pytorch_lightning",
        "random",
        "time",
        "tokenizers",
        "torch",
        "torchmetrics",
        "transformers",
    ]
)


def numbers_of(module: LightningModule) -> dict[_Place, float]:
    """Numbers that are attributes of submodules, metrics excepted, and of helpers.

    A helper is an object of the user's own class that is an attribute of the LightningModule.
    """
    return {
        (name, key): value
        for name, owner in _owners(module)
        for key, value in owner.items()
        if type(value) in (int, float)
    }


def _owners(module: LightningModule) -> Iterator[tuple[str, dict[str, Any]]]:
    metrics = tuple(f"{n}." for n, m in module.named_modules() if isinstance(m, Metric))
    for name, child in module.named_modules():
        if child is not module and not f"{name}.".startswith(metrics):
            yield name, child.__dict__
    for name, value in module.__dict__.items():
        own = type(value).__module__.partition(".")[0] not in _FOREIGN
        if own and not isinstance(value, (nn.Module, Tensor, type)) and hasattr(value, "__dict__"):
            yield name, vars(value)


def changed(before: dict[_Place, float], after: dict[_Place, float]) -> set[_Place]:
    """Where a number is another one."""
    return {p for p, value in after.items() if not is_same(before.get(p, value), value)}


def refuse_counters(
    module: LightningModule, step: str, twice: set[_Place], now: dict[_Place, float]
) -> None:
    """Refuses counters in modules, and warns of those in helpers.

    Args:
        module: The user's LightningModule.
        step: Name of the step.
        twice: Numbers that change each time it runs.
        now: What numbers are.

    Raises:
        StepError: Naming one of them.
    """
    modules = {name for name, _ in module.named_modules()}
    for name, key in sorted(twice):
        where = f"self.{name}.{key}"
        if name not in modules:
            warnings.warn(
                f"{step} changes {where}. A step runs once a microbatch on every stage that it "
                "reaches, so this happens several times, and not equally on all ranks. Count on "
                "the LightningModule itself, or in a hook such as on_train_batch_end.",
                stacklevel=2,
            )
            continue
        raise StepError(
            f"Each run of {step} changes the number {where}, now {now[name, key]!r}. In a pipeline "
            "it would change once a microbatch, and only on the ranks that run this code. Change "
            "it in a hook that runs on every rank, e.g. on_train_batch_start, count on the "
            "LightningModule itself, or keep it as a buffer that the forward writes to "
            f"(`self.{key}.add_(1)`, once a microbatch, as with accumulate_grad_batches)."
        )
