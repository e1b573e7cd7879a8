"""Averaged copies of trained modules: a teacher, a target net, a momentum encoder.

A hook that updates the copy loops over pairs of weights, `for p, q in zip(student.parameters(),
teacher.parameters())`, so that the two of each pair must be on the same stage.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.splitting import canonical_names, state_items
from lightning_pipeline.steps.survey import Survey

_DEPTH = 2  # modules this far below the LightningModule are compared: `self.ema.module`


def find_twins(module: LightningModule, survey: Survey) -> dict[str, str]:
    """Weights and buffers of untrained modules, with those of trained ones of the same structure.

    Args:
        module: The LightningModule.
        survey: What its training calls.

    Returns:
        For each canonical name of the copy that of its original. A wrong guess only binds weights
        to a stage that might as well be on another one.
    """
    canonical = canonical_names(module)
    modules = [(n, m) for n, m in _upper(module, "", _DEPTH) if any(True for _ in m.parameters())]
    trained = frozenset(
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and canonical[name] in _trained(survey)
    )
    has_trained = {n: any(t.startswith(n + ".") for t in trained) for n, _ in modules}
    twins: dict[str, str] = {}
    for name, copied in modules:
        if has_trained[name] or _name_of(copied, name, canonical)[0] in twins:
            continue  # trained itself, or inside a module that has been matched
        kind = _structure(copied)
        originals = [n for n, m in modules if has_trained[n] and _structure(m) == kind]
        if not originals:
            continue
        original = max(originals, key=lambda n: difflib.SequenceMatcher(None, n, name).ratio())
        pairs = zip(
            _name_of(copied, name, canonical),
            _name_of(module.get_submodule(original), original, canonical),
            strict=True,
        )
        twins.update((q, p) for q, p in pairs if q != p)
    return twins


def _upper(module: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Submodules down to a depth, a module before what is inside it."""
    for key, child in module.named_children():
        yield prefix + key, child
        if depth > 1:
            yield from _upper(child, f"{prefix}{key}.", depth - 1)


def _trained(survey: Survey) -> frozenset[str]:
    """Names that a gradient reaches, and those that the step's own code uses."""
    reads = (read for call in survey.calls if call.trains for read in call.reads)
    return frozenset(survey.used).union(*reads)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(tensor.shape)) for *_, name, tensor in state_items(module))


def _name_of(module: nn.Module, prefix: str, canonical: dict[str, str]) -> list[str]:
    return [canonical[f"{prefix}.{name}"] for *_, name, _ in state_items(module)]
