"""torchmetrics in steps: updated with whole batches on the last stage.

A metric inside a step is called once a microbatch. Its batch value (and for many metrics its state)
is not a mean of those, so the calls are noted and made once with the whole batch when the step is
over: batch and epoch values are those of one device, whatever the metric. Microbatches may select
rows or leave a call out; the calls at one place in the step's code belong together.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_pipeline.batch import parts_of
from lightning_pipeline.errors import PipelineError, StepError
from lightning_pipeline.joining import Call, in_order, joined
from lightning_pipeline.splitting.torch_private import pytree

_Unit = Metric | MetricCollection
Origin = tuple[str, int, str | None]
"""Name of a metric or collection, number of its call, key of one of a collection's values."""
_Place = tuple[Any, ...]
"""Name of a metric or collection, method, and where in the step that is called."""


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
        sizes: Rows of each microbatch, of every loader that the step draws from.
    """

    def __init__(self, module: LightningModule, sizes: Sequence[Sequence[int]] = ()) -> None:
        self._units = metric_units(module)
        self._names = {id(m): n for n, m in module.named_modules() if isinstance(m, Metric)}
        self._metrics = {n: m for n, m in module.named_modules() if isinstance(m, Metric)}
        self._unit_of = {
            id(inner): name
            for name, unit in self._units.items()
            for inner in unit.modules()
            if isinstance(inner, Metric)
        }
        self._others = sizes[1:]
        self._numbers: dict[tuple[_Place, int], int] = {}
        # Of each unit: arguments of the calls in each microbatch, by number.
        self._calls: dict[str, list[dict[int, Call]]] = {n: [] for n in self._units}
        self._times: list[Counter[_Place]] = []  # calls of each line, by microbatch
        self._places: list[_Place] = []  # by number
        self._latest: dict[str, int] = {}  # call of each unit that has a value
        self._rows: list[int] = []
        self._own_value = False
        self._root: CodeType | None = None
        self._given: dict[int, tuple[Tensor, Origin]] = {}
        self._errors: dict[int, Exception] = {}
        self._values: dict[int, Any] = {}
        self._caches: dict[int, dict[str, Any]] = {}

    def origin_of(self, value: Any) -> Origin | None:
        """The metric and the call of it in this step that returned ``value``.

        A metric itself stands for the value of its latest call.
        """
        if isinstance(value, Metric):
            unit = self._unit_of.get(id(value))
            latest = self._latest.get(unit) if unit is not None else None
            return None if unit is None or latest is None else (unit, latest, None)
        given = self._given.get(id(value))
        return given[1] if given is not None else None

    def value_of(self, origin: Origin) -> Tensor:
        """What that call returns for the whole batch.

        Raises:
            StepError: If it is not known which calls of the microbatches belong together.
        """
        unit, number, key = origin
        self._require_value(unit, number)
        value = self._values[number]
        return torch.as_tensor(value if key is None else value[key])

    def marked(self, tree: Any) -> Any:
        """``tree`` with marks in the place of what calls in this step returned."""
        parts = parts_of(tree)
        if parts is not None:
            children = [self.marked(child) for child in parts[0]]
            same = all(new is old for new, old in zip(children, parts[0], strict=True))
            return tree if same else parts[1](children)
        origin = self.origin_of(tree)
        return tree if origin is None else _Mark(origin)

    def filled(self, tree: Any) -> Any:
        """``tree`` with the values over the whole batch in the place of marks."""
        if isinstance(tree, _Mark):
            return self.value_of(tree.origin)
        parts = parts_of(tree)
        if parts is None:
            return tree
        children = [self.filled(child) for child in parts[0]]
        same = all(new is old for new, old in zip(children, parts[0], strict=True))
        return tree if same else parts[1](children)

    def name_of(self, metric: Metric) -> str | None:
        """Dotted name of a metric that is logged, ``None`` for one that is no attribute."""
        return self._names.get(id(metric))

    def batch_value(self, name: str, origin: Origin | None = None) -> Tensor | None:
        """Value of the metric over the batch, for ``on_step`` logs; ``None`` if it has none.

        Args:
            name: The metric's.
            origin: Its latest call when it was logged; ``None`` for the last one in the step.

        Raises:
            StepError: As :meth:`value_of`.
        """
        metric = self._metrics[name]
        unit = self._unit_of[id(metric)]
        number = origin[1] if origin is not None else self._latest.get(unit)
        if number is None:
            value = metric._forward_cache
        else:
            self._require_value(unit, number)
            value = self._caches[number].get(name)
        return None if value is None else torch.as_tensor(value)

    def begin(self, rows: int) -> None:
        """Announces a microbatch of ``rows`` samples, which the caller is about to run."""
        self._root = sys._getframe(1).f_code
        self._rows.append(rows)
        self._times.append(Counter())
        for calls in self._calls.values():
            calls.append({})

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
            number = self._number((name, method, *_site(self._root)))
            self._calls[name][-1][number] = pytree.tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            if method == "update":
                return None
            self._latest[name] = number
            value = self._own(unit, number, original, args, kwargs)
            for key, item in value.items() if isinstance(value, dict) else [(None, value)]:
                if isinstance(item, Tensor):
                    self._given[id(item)] = (item, (name, number, key))
            return value

        return noted

    def _number(self, place: _Place) -> int:
        """Number of a call: the same in all microbatches for the n-th one at one place."""
        self._times[-1][place] += 1
        key = (place, self._times[-1][place])
        if key not in self._numbers:
            self._numbers[key] = len(self._places)
            self._places.append(place)
        return self._numbers[key]

    def _own(
        self, unit: _Unit, number: int, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """What the call returns for the microbatch; NaN if it has too few rows to say."""
        self._own_value = True
        try:
            with _state_kept(unit), torch.no_grad():
                value = original(*args, **kwargs)
        except PipelineError:
            raise
        except Exception as error:
            # The whole batch may well have a value; if not, this is raised when the step is over.
            if hasattr(error, "add_note"):  # the traceback will lack the step's own lines
                error.add_note(f"in the step's call of the metric at {_line()}")
            self._errors.setdefault(number, error)
            nan = torch.tensor(float("nan"), device=_device_of((args, kwargs)))
            value = dict.fromkeys(unit.keys(), nan) if isinstance(unit, MetricCollection) else nan
        finally:
            self._own_value = False
        if isinstance(value, dict):  # copies: one tensor may stand under several keys
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
        return value

    def finish(self) -> None:
        """Makes the noted calls with whole batches.

        Raises:
            StepError: If one cannot be made so, and its value cannot be told from its parts.
        """
        for name, unit in self._units.items():
            for number in in_order([list(calls) for calls in self._calls[name]]):
                try:
                    with torch.no_grad():
                        self._values[number] = self._make(name, unit, number)
                except Exception as error:
                    raise self._errors.get(number, error) from None
                if self._places[number][1] == "forward":
                    self._latest[name] = number
                inside = ((n, m) for n, m in self._metrics.items() if self._unit_of[id(m)] == name)
                self._caches[number] = {n: metric._forward_cache for n, metric in inside}

    def _make(self, name: str, unit: _Unit, number: int) -> Any:
        """One noted call: with the whole batch if that is possible, else part by part."""
        made = [i for i, calls in enumerate(self._calls[name]) if number in calls]
        calls = [self._calls[name][index][number] for index in made]
        method = self._places[number][1]
        if self._is_aligned(number):
            rows, *others = [[size[i] for i in made] for size in (self._rows, *self._others)]
            call = joined(calls, rows, others)
            if call is not None:
                return getattr(unit, method)(*call[0], **call[1])
        if any(isinstance(inner, WrapperMetric) for inner in unit.modules()):
            raise StepError(
                f"What the step gives self.{name} in each microbatch cannot be joined to what it "
                "would be for the whole batch, and a metric around metrics cannot be updated part "
                "by part. Give it tensors whose first dims are equal, with a row a sample or a row "
                "a selected sample, or update it in a hook such as on_train_batch_end."
            )
        members = _members(unit)
        values = {k: _together(m, calls) for k, m in members} if method == "forward" else {}
        for args, kwargs in calls:
            unit.update(*args, **kwargs)
        if method != "forward":
            return None
        for key, metric in members:
            metric._forward_cache = values[key]
        return values if isinstance(unit, MetricCollection) else values[None]

    def _is_aligned(self, number: int) -> bool:
        """Whether the n-th call at a place is the same one in all microbatches that make it."""
        place = self._places[number]
        return len({times[place] for times in self._times if times[place]}) == 1

    def _require_value(self, name: str, number: int) -> None:
        if not self._is_aligned(number):
            times = sorted({times[self._places[number]] for times in self._times} - {0})
            raise StepError(
                f"The value of self.{name} over the batch is not known: one line calls it "
                f"{' or '.join(map(str, times))} times, depending on the microbatch, so which "
                "calls belong together is not clear. Call it equally often, also with the rows of "
                f"an empty selection; or call self.{name}.update(...) and log self.{name} or "
                "compute it in a hook behind the step."
            )


class _Mark:
    """Stands for the value of a metric over the batch, while outputs of microbatches are joined."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and other.origin == self.origin

    __hash__ = None  # type: ignore[assignment]


def _site(root: CodeType | None) -> _Place:
    """The place of a call in the code: each line on the way to it from the frame of ``root``."""
    frame, place = sys._getframe(2), []
    while frame is not None:
        place += [id(frame.f_code), frame.f_lasti]
        if frame.f_code is root:
            return tuple(place)
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError("the microbatch was not announced by the one who runs it")


def _line() -> str:
    """File and line at which the step's code calls a metric."""
    frames = reversed(traceback.extract_stack()[:-1])
    inside = (__file__, torch.nn.modules.module.__file__)
    found = next(frame for frame in frames if frame.filename not in inside)
    return f"{found.filename}:{found.lineno}"


def _device_of(tree: Any) -> torch.device:
    found = (leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return next(found, torch.device("cpu"))


def _members(unit: _Unit) -> list[tuple[str | None, Metric]]:
    """The metrics of a unit, by the key of their value."""
    if isinstance(unit, Metric):
        return [(None, unit)]
    return list(unit.items(keep_base=False, copy_state=False))


def _together(metric: Metric, calls: list[Call]) -> Any:
    """Value of a metric that has seen only ``calls``, as forward computes it."""
    syncs = metric.dist_sync_on_step
    with _state_kept(metric):
        metric.reset()
        for args, kwargs in calls:
            metric.update(*args, **metric._filter_kwargs(**kwargs))
        metric._to_sync = metric.dist_sync_on_step = syncs
        return metric.compute()


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
