"""torchmetrics in hooks: computed on the last stage, known on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_pipeline.mesh import Mesh
from lightning_pipeline.messages import broadcast_object
from lightning_pipeline.steps import stream


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
            value = self._share(box[0], metric)
            if isinstance(metric, WrapperMetric) or not metric.compute_with_cache:
                return value
            metric._computed = value
        return metric._computed

    def _share(self, value: Any, metric: Metric) -> Any:
        mesh, what = self._mesh, f"What {type(metric).__name__}.compute returns"
        return broadcast_object(value, what, mesh.last_rank, mesh.pipeline_group, metric.device)

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
