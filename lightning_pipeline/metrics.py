"""torchmetrics across stages: updated with whole batches on the last stage, computed for all.

A metric inside a step is called once a microbatch. Its batch value (and for many metrics its state)
is not a mean of those, so the calls are noted and made once with the whole batch when the step is
over: batch and epoch values are those of one device, whatever the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_pipeline.mesh import Mesh

_Unit = Metric | MetricCollection


def metric_units(module: LightningModule) -> dict[str, _Unit]:
    """The outermost metrics and collections of ``module``, by dotted name."""
    units: dict[str, _Unit] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(outer + ".") for outer in units)
        if isinstance(child, (Metric, MetricCollection)) and not inside:
            units[name] = child
    return units


class StepMetrics:
    """The metrics of one step on the last stage.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._units = metric_units(module)
        self._names = {id(m): n for n, m in module.named_modules() if isinstance(m, Metric)}
        self._metrics = {n: m for n, m in module.named_modules() if isinstance(m, Metric)}
        # Calls of each unit: [microbatches][calls] of (method, args, kwargs).
        self._calls: dict[str, list[list[tuple[str, Any, Any]]]] = {n: [] for n in self._units}
        self._weights: list[int] = []
        self._own_value = False

    def name_of(self, metric: Metric) -> str | None:
        """Dotted name of a metric that is logged, ``None`` for one that is no attribute."""
        return self._names.get(id(metric))

    def batch_value(self, name: str) -> Tensor:
        """Value of the metric over the batch, for ``on_step`` logs."""
        value = self._metrics[name]._forward_cache
        return torch.tensor(float("nan")) if value is None else torch.as_tensor(value)

    def begin(self, rows: int) -> None:
        """Announces a microbatch of ``rows`` samples."""
        self._weights.append(rows)
        for calls in self._calls.values():
            calls.append([])

    def patches(self) -> list[tuple[object, str, Any]]:
        """Instance attributes under which calls inside a microbatch are noted."""
        changes: list[tuple[object, str, Any]] = []
        for name, unit in self._units.items():
            changes.append((unit, "forward", self._noting(name, unit, "forward")))
            changes.append((unit, "update", self._noting(name, unit, "update")))
        return changes

    def _noting(self, name: str, unit: _Unit, method: str) -> Callable[..., Any]:
        original = getattr(unit, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._own_value:  # Metric.forward calls self.update
                return original(*args, **kwargs)
            detached = pytree.tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            self._calls[name][-1].append((method, *detached))
            if method == "update":
                return None
            self._own_value = True
            try:
                with _state_kept(unit), torch.no_grad():
                    return original(*args, **kwargs)  # the microbatch's own value
            finally:
                self._own_value = False

        return noted

    def finish(self) -> None:
        """Makes the noted calls with whole batches."""
        for name, unit in self._units.items():
            calls = self._calls[name]
            for method, args, kwargs in _whole_batch_calls(calls, self._weights):
                with torch.no_grad():
                    getattr(unit, method)(*args, **kwargs)


@contextmanager
def _state_kept(unit: _Unit) -> Iterator[None]:
    """Lets a metric run from its present state and puts that back."""
    metrics = [m for m in unit.modules() if isinstance(m, Metric)]
    saved = [
        (m, m._copy_state_dict(), m._update_count, m._forward_cache, m._computed) for m in metrics
    ]
    try:
        yield
    finally:
        for metric, state, count, cache, computed in saved:
            for key, value in state.items():
                setattr(metric, key, value)
            metric._update_count, metric._forward_cache = count, cache
            metric._computed = computed


def _whole_batch_calls(
    calls: list[list[tuple[str, Any, Any]]], weights: list[int]
) -> Iterator[tuple[str, Any, Any]]:
    """Joins the calls of all microbatches; calls that differ in kind are made one by one."""
    kinds = {
        tuple((method, str(pytree.tree_structure((a, k)))) for method, a, k in mb) for mb in calls
    }
    if len(kinds) != 1:
        for microbatch in calls:
            yield from microbatch
        return
    for same in zip(*calls, strict=True):
        flat = [pytree.tree_flatten((args, kwargs)) for _, args, kwargs in same]
        joined = [_join(leaves, weights) for leaves in zip(*(f[0] for f in flat), strict=True)]
        args, kwargs = pytree.tree_unflatten(joined, flat[0][1])
        yield same[0][0], args, kwargs


def _join(leaves: tuple[Any, ...], weights: list[int]) -> Any:
    """One argument over all microbatches: rows are put together, single numbers averaged."""
    first = leaves[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(leaves)
    if isinstance(first, Tensor) and first.is_floating_point():
        weighted = [leaf.double() * weight for leaf, weight in zip(leaves, weights, strict=True)]
        return (torch.stack(weighted).sum() / sum(weights)).to(first.dtype)
    if isinstance(first, float):
        return sum(x * w for x, w in zip(leaves, weights, strict=True)) / sum(weights)
    return first


class SharedCompute:
    """Lets every rank of a pipeline see what the last stage's metrics compute.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self._mesh = mesh
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._known: dict[int, Any] = {}
        self._undo: list[tuple[Metric, str, Any]] = []
        self.inside_step = False
        for metric in self._metrics:
            self._install(metric, "compute", self._compute)
            self._install(metric, "reset", self._reset)
            metric.process_group = mesh.data_group

    def forget(self) -> None:
        """The metrics were updated: what was computed is old."""
        self._known.clear()

    def remove(self) -> None:
        """Gives the metrics their own methods back."""
        for metric, key, original in self._undo:
            metric.__dict__[key] = original
            metric.process_group = None
        self._undo = []

    def _install(self, metric: Metric, key: str, method: Callable[..., Any]) -> None:
        original = getattr(metric, key)
        self._undo.append((metric, key, original))

        def shared(*args: Any, **kwargs: Any) -> Any:
            return method(metric, original, *args, **kwargs)

        metric.__dict__[key] = shared

    def _compute(self, metric: Metric, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        if self.inside_step or not metric._to_sync:
            return original(*args, **kw)
        if id(metric) not in self._known:
            box = [original(*args, **kw) if self._mesh.is_last else None]
            dist.broadcast_object_list(box, self._mesh.last_rank, self._mesh.pipeline_group)
            self._known[id(metric)] = box[0]
        return self._known[id(metric)]

    def _reset(self, metric: Metric, original: Callable[..., Any]) -> None:
        self._known.pop(id(metric), None)
        original()
