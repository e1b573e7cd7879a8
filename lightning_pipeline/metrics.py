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
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_pipeline.errors import StepError
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps import stream

_Unit = Metric | MetricCollection
Origin = tuple[str, str | None]
"""Name of a metric or collection, and the key of one of a collection's values."""


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
        self._given: dict[int, tuple[Tensor, Origin]] = {}
        self._values: dict[str, Any] = {}

    def origin_of(self, value: Any) -> Origin | None:
        """The metric whose call in this step returned ``value``."""
        given = self._given.get(id(value))
        return given[1] if given is not None else None

    def value_of(self, origin: Origin) -> Tensor:
        """What that call returns for the whole batch."""
        unit, key = origin
        value = self._values[unit]
        return value if key is None else value[key]

    def name_of(self, metric: Metric) -> str | None:
        """Dotted name of a metric that is logged, ``None`` for one that is no attribute."""
        return self._names.get(id(metric))

    def batch_value(self, name: str) -> Tensor | None:
        """Value of the metric over the batch, for ``on_step`` logs; ``None`` if it has none."""
        value = self._metrics[name]._forward_cache
        return None if value is None else torch.as_tensor(value)

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
            changes.append((unit, "compute", self._refusing(name, unit)))
        return changes

    def _refusing(self, name: str, unit: _Unit) -> Callable[..., Any]:
        original = unit.compute

        def computed(*args: Any, **kwargs: Any) -> Any:
            if self._own_value or not any(self._calls[name]):
                return original(*args, **kwargs)
            raise StepError(
                f"The step computes self.{name} after it updated it. A step runs once a "
                "microbatch, so the value over the batch is not known before it has ended. Log "
                f"the metric itself, self.log('{name}', self.{name}), or compute it in a hook "
                "behind the step."
            )

        return computed

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
                    value = original(*args, **kwargs)  # the microbatch's own
                if isinstance(value, dict):  # copies: one tensor may stand under several keys
                    value = {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
                for key, item in value.items() if isinstance(value, dict) else [(None, value)]:
                    if isinstance(item, Tensor):
                        self._given[id(item)] = (item, (name, key))
                return value
            finally:
                self._own_value = False

        return noted

    def finish(self) -> None:
        """Makes the noted calls with whole batches."""
        for name, unit in self._units.items():
            calls = self._calls[name]
            for method, args, kwargs in _whole_batch_calls(calls, self._weights):
                with torch.no_grad():
                    self._values[name] = getattr(unit, method)(*args, **kwargs)


@contextmanager
def _state_kept(unit: _Unit) -> Iterator[None]:
    """Lets a metric run by itself from its present state and puts that back."""
    metrics = [m for m in unit.modules() if isinstance(m, Metric)]
    saved = [(m, m._copy_state_dict(), dict(m.__dict__)) for m in metrics]
    for metric in metrics:
        metric.dist_sync_on_step = False
    try:
        yield
    finally:
        for metric, state, attributes in saved:
            metric.__dict__.clear()
            metric.__dict__.update(attributes)  # wrappers count in attributes that are no states
            for key, value in state.items():
                setattr(metric, key, value)


def _whole_batch_calls(
    calls: list[list[tuple[str, Any, Any]]], weights: list[int]
) -> Iterator[tuple[str, Any, Any]]:
    """Joins the calls of all microbatches; calls that cannot be joined are made one by one."""
    kinds = {
        tuple((method, str(pytree.tree_structure((a, k)))) for method, a, k in microbatch)
        for microbatch in calls
    }
    for same in zip(*calls, strict=True) if len(kinds) == 1 else ():
        flat = [pytree.tree_flatten((args, kwargs)) for _, args, kwargs in same]
        joined = [_join(values, weights) for values in zip(*(f[0] for f in flat), strict=True)]
        if any(value is _APART for value in joined):
            yield from same
        else:
            args, kwargs = pytree.tree_unflatten(joined, flat[0][1])
            yield same[0][0], args, kwargs
    if len(kinds) > 1:
        for microbatch in calls:
            yield from microbatch


_APART = object()


def _join(values: tuple[Any, ...], rows: list[int]) -> Any:
    """One argument over all microbatches, ``_APART`` if there is no such thing.

    Rows are put together, numbers of samples added, floating-point numbers averaged by rows.
    """
    first = values[0]
    numbers = [
        value.item() if isinstance(value, Tensor) and not value.ndim else value for value in values
    ]
    if isinstance(first, Tensor) and first.ndim:
        stacks = all(len(value) % n == 0 for value, n in zip(values, rows, strict=True))
        if stacks:
            return torch.cat(values)
        return first if all(torch.equal(first, value) for value in values) else _APART
    if all(type(number) is int for number in numbers):
        if numbers == rows:
            return sum(rows) if isinstance(first, int) else first.new_tensor(sum(rows))
        return first if len(set(numbers)) == 1 else _APART
    if all(type(number) is float for number in numbers):
        mean = sum(n * w for n, w in zip(numbers, rows, strict=True)) / sum(rows)
        return mean if isinstance(first, float) else first.new_tensor(mean)
    try:
        return first if all(bool(value == first) for value in values) else _APART
    except (TypeError, ValueError, RuntimeError):
        return _APART


class SharedCompute:
    """Lets every rank of a pipeline see what the last stage's metrics compute.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh
        self._undo: dict[int, tuple[Metric, Any]] = {}
        self._nested = False
        self.inside_step = False
        self.forget()

    def forget(self) -> None:
        """A step may have updated the metrics, or made new ones: what was computed is old."""
        for metric in self._module.modules():
            if isinstance(metric, Metric):
                metric._computed = None
                if id(metric) not in self._undo:
                    self._install(metric)

    def remove(self) -> None:
        """Gives the metrics their own methods back."""
        for metric, original in self._undo.values():
            metric.__dict__["compute"] = original
        self._undo = {}

    def _install(self, metric: Metric) -> None:
        original = metric.compute
        self._undo[id(metric)] = (metric, original)

        def shared(*args: Any, **kwargs: Any) -> Any:
            return self._compute(metric, original, *args, **kwargs)

        metric.__dict__["compute"] = shared

    def _compute(self, metric: Metric, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        # Only Metric.forward computes without leaving the synchronised state; ranks have all called
        # it, with the same arguments.
        in_forward = not metric._should_unsync
        if self._nested or self.inside_step or in_forward:
            with self._over_replicas(metric):
                return original(*args, **kw)
        # What it computed last is forgotten by the metric's own update and reset, on all ranks.
        if metric._computed is None:
            box = [None]
            if self._mesh.is_last:
                with self._over_replicas(metric), stream(0, metric.device):
                    box = [original(*args, **kw)]
            dist.broadcast_object_list(box, self._mesh.last_rank, self._mesh.pipeline_group)
            if isinstance(metric, WrapperMetric) or not metric.compute_with_cache:
                return box[0]
            metric._computed = box[0]
        return metric._computed

    @contextmanager
    def _over_replicas(self, metric: Metric) -> Iterator[None]:
        """Lets a metric and those that it wraps synchronise over the replicas."""
        # Set for the call only: a process group in a metric would make it impossible to copy.
        inside = [m for m in metric.modules() if isinstance(m, Metric)]
        nested, self._nested = self._nested, True
        groups = [m.process_group for m in inside]
        for m in inside:
            m.process_group = self._mesh.data_group
        try:
            yield
        finally:
            self._nested = nested
            for m, group in zip(inside, groups, strict=True):
                m.process_group = group
