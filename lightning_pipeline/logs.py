"""What a step logs: recorded per microbatch on the last stage, replayed on every rank.

One small broadcast a step carries the values from the last stage to the other ranks of its
pipeline, with the loss. Then the real ``self.log`` runs everywhere, so that callbacks decide alike
on all ranks.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline.agreement import Agreement
from lightning_pipeline.cache import Cache
from lightning_pipeline.errors import StepError
from lightning_pipeline.merging import Place, is_whole
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.messages import broadcast_object
from lightning_pipeline.metrics import Origin, StepMetrics

# structure, loss, number of values, dtype of the loss, more to come, weight of the batch
_HEADER = 6
_LOSS_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CAPACITY = 64  # values in the first broadcast; more follow in a second one
_CACHED_STRUCTURES = 256
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}

_Key = tuple[str, int]  # name and number of the call with this name in a microbatch


@dataclass
class _Entry:
    """One name that a step logs."""

    arguments: dict[str, Any]
    metric: str | None
    origin: Origin | None
    dtype: torch.dtype
    is_whole: bool
    values: list[Tensor] = field(default_factory=list)
    sizes: list[float | None] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)

    @property
    def weights(self) -> list[float]:
        """What each value counts in the batch: its share, or the size that was given for it.

        A size that is the same for microbatches of other rows is no size of theirs.
        """
        constant = len(set(self.sizes)) == 1 and self.sizes != self.rows
        return self.shares if constant else [_first(*pair) for pair in self.pairs()]

    def pairs(self) -> Iterator[tuple[float | None, float]]:
        """Given size and share of each value."""
        return zip(self.sizes, self.shares, strict=True)


def _first(size: float | None, share: float) -> float:
    return share if size is None else size


class LogRecorder:
    """Stands in for ``LightningModule.log`` while microbatches run on the last stage.

    Args:
        module: The user's LightningModule.
        metrics: The metrics of this step.
        constants: Batch sizes that have been the same for all microbatches of the run, each with
            the number of microbatches of the first batch, by what is logged; kept up to date.
        counts: Where the step makes whole numbers that depend on the microbatch; see
            :class:`lightning_pipeline.merging.Merger`.
    """

    def __init__(
        self,
        module: LightningModule,
        metrics: StepMetrics,
        constants: dict[_Key, tuple[float, int] | None],
        counts: set[Place],
    ) -> None:
        self._module, self._metrics, self._counts = module, metrics, counts
        self._entries: dict[_Key, _Entry] = {}
        self._constants = constants
        self._calls: Counter[str] = Counter()
        self.rows = 0

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        **arguments: Any,
    ) -> None:
        """Notes one value of one microbatch; the signature of ``LightningModule.log``."""
        arguments.update(prog_bar=prog_bar, logger=logger, on_step=on_step, on_epoch=on_epoch)
        arguments.update(reduce_fx=reduce_fx)
        batch_size = arguments.pop("batch_size", None)
        _check_group(name, arguments.pop("sync_dist_group", None))
        arguments["batch_size"] = batch_size is not None
        metric = self._metrics.name_of(value) if isinstance(value, Metric) else None
        tensor = torch.zeros(()) if metric is not None else _scalar(name, value)
        key = (name, self._calls[name])
        self._calls[name] += 1
        if key not in self._entries:
            origin = self._metrics.origin_of(value)
            self._entries[key] = _Entry(arguments, metric, origin, tensor.dtype, is_whole(value))
        entry = self._entries[key]
        if entry.arguments != arguments:
            raise StepError(
                f"self.log({name!r}) is called with different arguments in one step: "
                f"{entry.arguments} and {arguments}. Log each name in one way."
            )
        entry.values.append(tensor.to(torch.float64))
        entry.sizes.append(None if batch_size is None else float(batch_size))

    def end(self, weight: float | None) -> None:
        """Ends a microbatch: what it logged counts as much as its rows, or its own weight."""
        share = float(self.rows) if weight is None else weight
        for entry in self._entries.values():
            new = len(entry.values) - len(entry.shares)
            entry.shares += [share] * new
            entry.rows += [float(self.rows)] * new
        self._calls.clear()

    def structure(self) -> list[tuple[str, dict[str, Any], str | None, torch.dtype | None]]:
        """Names, arguments, metrics and dtypes, in the order of the first log.

        There is no dtype where a metric has no value for the batch: it was only updated.
        """
        return [
            (name, e.arguments, e.metric, None if self._is_only_updated(e) else e.dtype)
            for (name, _), e in self._entries.items()
        ]

    def _is_only_updated(self, entry: _Entry) -> bool:
        return (
            entry.metric is not None
            and self._metrics.batch_value(entry.metric, entry.origin) is None
        )

    def values(self, device: torch.device) -> Tensor:
        """Value and weight of every name over the whole batch, float64 of shape [2 x names]."""
        flat: list[Tensor] = []
        for key, entry in self._entries.items():
            weights = torch.tensor(entry.weights, dtype=torch.float64, device=device)
            if entry.metric is not None:
                known = self._metrics.batch_value(entry.metric, entry.origin)
                value = torch.zeros(()) if known is None else known
                value = value.to(device, torch.float64)
            elif entry.origin is not None:
                value = self._metrics.value_of(entry.origin).to(device, torch.float64)
            else:
                values = torch.stack([v.to(device) for v in entry.values])
                value = _reduced(values, weights, entry.arguments["reduce_fx"])
                if self._is_count(key[0], entry):
                    value = values.sum()
            flat += [value, value.new_tensor(self._total(key, entry))]
        return torch.stack(flat) if flat else torch.zeros(0, dtype=torch.float64, device=device)

    def _is_count(self, name: str, entry: _Entry) -> bool:
        """Whether it is a whole number to add, such as that of the tokens of a microbatch."""
        if not entry.is_whole or _reduction(entry.arguments["reduce_fx"]) != "mean":
            return False
        if len({float(value) for value in entry.values}) > 1:
            self._counts.add(("log", name))
        return ("log", name) in self._counts

    def _total(self, key: _Key, entry: _Entry) -> float:
        """What the batch counts in means over several."""
        if key not in self._constants:
            constant = len(set(entry.sizes)) == 1 and entry.sizes[0] is not None
            is_rows = entry.sizes == entry.rows
            known = (entry.sizes[0] or 0.0, len(entry.sizes)) if constant and not is_rows else None
            self._constants[key] = known
        known = self._constants[key]
        if known is None or set(entry.sizes) != {known[0]}:
            self._constants[key] = None
            return sum(_first(*pair) for pair in entry.pairs())
        return known[0] * known[1]  # also if this batch has fewer rows than microbatches


def _check_group(name: str, group: Any) -> None:
    if group not in (None, dist.group.WORLD):
        raise StepError(
            f"self.log({name!r}, sync_dist_group=...) in a step must be None or the group of all "
            "ranks: a value is on the last stages only, and is reduced over the replicas. Remove "
            "sync_dist_group, or log in a hook behind the step."
        )


def _scalar(name: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.numel() != 1:
        raise StepError(
            f"self.log({name!r}) needs a single value, got a tensor of shape "
            f"{tuple(tensor.shape)}. Log its mean, e.g. self.log({name!r}, value.mean())."
        )
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.detach().reshape(())


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    return _REDUCTIONS.get(name.lower(), "mean")


def _reduced(values: Tensor, weights: Tensor, reduce_fx: Any) -> Tensor:
    reduction = _reduction(reduce_fx)
    if reduction == "mean":
        return (values * weights)[weights > 0].sum() / weights.sum()
    if reduction == "sum":
        return values.sum()
    return values.max() if reduction == "max" else values.min()


class LogExchange:
    """Carries a step's logs over the pipeline and replays them.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
        device: The rank's device.
    """

    def __init__(self, module: LightningModule, mesh: Mesh, device: torch.device) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._structures: Cache[list[Any]] = Cache(_CACHED_STRUCTURES)
        self._agreement = Agreement(module, mesh)

    def __call__(
        self,
        recorder: LogRecorder | None,
        loss: Tensor | None,
        weight: float | None,
        more: Any,
    ) -> tuple[Tensor, float | None, Any]:
        """Replays the logs of one step on every rank of the pipeline.

        Args:
            recorder: What was logged; ``None`` except on the last stage.
            loss: The batch's loss on the last stage.
            weight: The weight that the step gave to the batch, on the last stage.
            more: Whatever else the other ranks need of the last stage, ``None`` for nothing.

        Returns:
            The loss, the weight and ``more`` of the last stage.
        """
        if self._module.trainer.training:
            self._agreement.check()
        header, values, structure = self._broadcast(recorder, loss, weight, more)
        if int(header[4]):
            more = self._broadcast_object(more, "What the step returns, appends or sets")
        self._replay(structure, values)
        given = float(header[5])
        return header[1].to(_LOSS_DTYPES[int(header[3])]), None if given < 0 else given, more

    def _broadcast(
        self,
        recorder: LogRecorder | None,
        loss: Tensor | None,
        weight: float | None,
        more: Any,
    ) -> tuple[Tensor, Tensor, list[Any]]:
        message = torch.zeros(_HEADER + _CAPACITY, dtype=torch.float64, device=self._device)
        values, structure = torch.zeros(0, dtype=torch.float64, device=self._device), None
        if recorder is not None:
            structure, values = recorder.structure(), recorder.values(self._device)
            message[0] = _identity(structure)
            message[2] = values.numel()
            if loss is not None:
                message[1], message[3] = loss, _LOSS_DTYPES.index(loss.dtype)
            message[4] = float(more is not None)
            message[5] = -1.0 if weight is None else weight
            message[_HEADER : _HEADER + values.numel()] = values[:_CAPACITY]
        self._send(message)
        identity, count = int(message[0]), int(message[2])
        if count > _CAPACITY:
            rest = values[_CAPACITY:] if recorder else message.new_zeros(count - _CAPACITY)
            self._send(rest)
            values = torch.cat([message[_HEADER:], rest])
        else:
            values = message[_HEADER : _HEADER + count]
        known = self._structures.get(
            identity, lambda: self._broadcast_object(structure, "What the step logs")
        )
        return message[:_HEADER], values, known

    def _send(self, message: Tensor) -> None:
        dist.broadcast(message, self._mesh.last_rank, self._mesh.pipeline_group)

    def _broadcast_object(self, value: Any, what: str) -> Any:
        mesh = self._mesh
        return broadcast_object(value, what, mesh.last_rank, mesh.pipeline_group, self._device)

    def _replay(self, structure: list[Any], values: Tensor) -> None:
        for index, (name, given, metric, dtype) in enumerate(structure):
            arguments = dict(given)
            if arguments.pop("batch_size"):
                arguments["batch_size"] = int(values[2 * index + 1])
            if self._mesh.sizes.data == 1:
                arguments["sync_dist"] = True  # equal on all ranks: Lightning need not warn
            value: Any = values[2 * index].to(dtype or torch.get_default_dtype())
            if metric is not None:
                logged: Any = self._module.get_submodule(metric)
                cache = value.to(torch.get_default_dtype()) if dtype is not None else None
                logged._forward_cache, value = cache, logged
            self._module.log(name, value, **arguments)


def _identity(structure: Any) -> int:
    return zlib.crc32(repr(structure).encode()) or 1
