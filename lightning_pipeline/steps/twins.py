"""Averaged copies of trained modules: a teacher, a target net, a momentum encoder.

A hook that updates the copy loops over pairs of weights, `for p, q in zip(student.parameters(),
teacher.parameters())`, so that the two of each pair must be on the same stage.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.splitting import canonical_names, state_items
from lightning_pipeline.steps.survey import Survey

_DEPTH = 2  # modules this far below the LightningModule are compared: `self.ema.module`
_COMPARED = 64  # names that each copy's is compared with, so that a thousand layers stay linear


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
    used = _trained(survey)
    trained = {
        prefix
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and canonical[name] in used
        for prefix in accumulate(name.split("."), "{}.{}".format)
    }
    copies = [(name, m) for name, m in modules if name not in trained]
    originals: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, m in modules if copies else ():
        if name in trained:
            structure = _structure(m)
            originals[structure].append(name)
            alike[structure, _ending(name)].append(name)
    twins: dict[str, str] = {}
    for name, copied in copies:
        if _name_of(copied, name, canonical)[0] in twins:
            continue  # inside a module that has been matched
        structure = _structure(copied)
        found = originals.get(structure)
        if found is None:
            continue
        if len(found) > _COMPARED:
            found = (alike.get((structure, _ending(name))) or found)[:_COMPARED]
        original = max(found, key=lambda n: difflib.SequenceMatcher(None, n, name).ratio())
        pairs = zip(
            _name_of(copied, name, canonical),
            _name_of(module.get_submodule(original), original, canonical),
            strict=True,
        )
        twins.update((q, p) for q, p in pairs if q != p)
    return twins


def _ending(name: str) -> str:
    """What the names of a layer and of its copy have in common: `0` of `target.0`."""
    return name.partition(".")[2]


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
