"""What a step logs: recorded per microbatch on the last stage, replayed on every rank.

One small broadcast a step carries the values from the last stage to the other ranks of its
pipeline, with the loss. What is computed on a device stays there and travels by itself, so that no
rank waits for its device. Then the real ``self.log`` runs everywhere, so that callbacks decide
alike on all ranks.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline import transfers
from lightning_pipeline.agreement import Agreement
from lightning_pipeline.cache import Cache
from lightning_pipeline.errors import StepError
from lightning_pipeline.merging import Place, is_whole
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.messages import broadcast_object
from lightning_pipeline.metrics import Origin, StepMetrics
from lightning_pipeline.transfers import placed

# structure, number of names, dtype of the loss, more to come, weight of the batch
_HEADER = 5
_LOSS_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CAPACITY = 64  # numbers in the first broadcast; more follow in a second one
_CACHED_STRUCTURES = 256
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}

_Key = tuple[str, int]  # name and number of the call with this name in a microbatch


@dataclass
class _Entry:
    """One name that a step logs.

    Attributes:
        fresh: Values of the microbatch that runs, as they were logged.
        is_loss: Whether every value is the loss of its microbatch, which is no sum or extreme.
    """

    arguments: dict[str, Any]
    metric: str | None
    origin: Origin | None
    dtype: torch.dtype
    is_whole: bool
    values: list[Tensor] = field(default_factory=list)
    sizes: list[float | None] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    is_loss: bool = True

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
        self.rows = self._ended = 0

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
        entry.fresh.append(tensor)
        entry.sizes.append(None if batch_size is None else float(batch_size))

    def end(self, loss: Any = None) -> None:
        """Ends a microbatch.

        Args:
            loss: What the step returned as its loss, if it did.
        """
        place = loss.data_ptr() if isinstance(loss, Tensor) else None
        for entry in self._entries.values():
            new = len(entry.values) - len(entry.rows)
            entry.is_loss &= all(value.data_ptr() == place for value in entry.fresh)
            entry.fresh.clear()
            entry.microbatches += [self._ended] * new
            entry.rows += [float(self.rows)] * new
        self._ended += 1
        self._calls.clear()

    def weigh(self, weights: Sequence[float | None]) -> None:
        """Ends the batch: what a microbatch logged counts as much as its weight, or its rows."""
        for entry in self._entries.values():
            given = [weights[index] for index in entry.microbatches]
            entry.shares = [_first(*pair) for pair in zip(given, entry.rows, strict=True)]

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

    def values(self, device: torch.device) -> list[Tensor]:
        """Value of every name over the whole batch, on ``device``, float64 of shape []."""
        return [self._value(key[0], e, device).double() for key, e in self._entries.items()]

    def _value(self, name: str, entry: _Entry, device: torch.device) -> Tensor:
        if entry.metric is not None:
            known = self._metrics.batch_value(entry.metric, entry.origin)
            return torch.zeros((), device=device) if known is None else placed(known, device)
        if entry.origin is not None:
            return placed(self._metrics.value_of(entry.origin), device)
        values = torch.stack([placed(value, device) for value in entry.values])
        if self._is_count(name, entry, values):
            return values.sum()
        reduction = "mean" if entry.is_loss else _reduction(entry.arguments["reduce_fx"])
        return _reduced(values, entry.weights, reduction)

    def totals(self) -> list[float]:
        """What the batch counts under every name in means over several."""
        return [self._total(key, entry) for key, entry in self._entries.items()]

    def _is_count(self, name: str, entry: _Entry, values: Tensor) -> bool:
        """Whether it is a whole number to add, such as that of the tokens of a microbatch."""
        if not entry.is_whole or _reduction(entry.arguments["reduce_fx"]) != "mean":
            return False
        if ("log", name) not in self._counts and len(set(values.tolist())) > 1:
            self._counts.add(("log", name))
        return ("log", name) in self._counts

    def _total(self, key: _Key, entry: _Entry) -> float:
        """What the batch counts under one name."""
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


def _reduced(values: Tensor, weights: list[float], reduction: str) -> Tensor:
    if reduction == "mean":
        weighted = [v * weight for v, weight in zip(values, weights, strict=True) if weight > 0]
        if not weighted:
            return values.new_full((), math.nan)
        return torch.stack(weighted).sum() / sum(weights)
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
        structure: list[Any] | None = None
        own: list[float] | None = None
        values = None
        if recorder is not None:
            structure, numbers = recorder.structure(), recorder.values(self._device)
            kind = 0.0 if loss is None else float(_LOSS_DTYPES.index(loss.dtype))
            given = -1.0 if weight is None else weight
            own = [_identity(structure), len(numbers), kind, more is not None, given]
            own += recorder.totals()
            first = torch.zeros((), device=self._device) if loss is None else loss
            values = torch.stack([first.double(), *numbers])
        (identity, _, kind, is_more, given, *totals), values = self._broadcast(own, values)
        structure = self._structures.get(
            int(identity), lambda: self._broadcast_object(structure, "What the step logs")
        )
        if is_more:
            more = self._broadcast_object(more, "What the step returns, appends or sets")
        self._replay(structure, values[1:], totals)
        return values[0].to(_LOSS_DTYPES[int(kind)]), None if given < 0 else given, more

    def _broadcast(
        self, own: list[float] | None, values: Tensor | None
    ) -> tuple[list[float], Tensor]:
        """Header and totals of the last stage, and its loss and values.

        Args:
            own: The former, on the last stage.
            values: The latter, on the rank's device: float64 of shape [1 + names].
        """
        if transfers.is_host(self._device):  # all in one message
            told = self._tell(own and [*own, *cast(Tensor, values).tolist()])
            count = _HEADER + int(told[1])
            return told[:count], torch.from_numpy(np.array(told[count:]))
        told = self._tell(own)
        if values is None:
            size = 1 + int(told[1])
            values = torch.empty(size, dtype=torch.float64, device=self._device)
        self._send(values)
        return told, values

    def _tell(self, numbers: list[float] | None) -> list[float]:
        """Numbers of the last stage's host, which alone knows how many there are."""
        message = np.zeros(1 + _CAPACITY)
        if numbers is not None:
            message[: 1 + min(_CAPACITY, len(numbers))] = [len(numbers), *numbers[:_CAPACITY]]
        self._send(torch.from_numpy(message))
        size, found = int(message[0]), message[1:].tolist()
        if size > _CAPACITY:
            rest = np.array(numbers[_CAPACITY:]) if numbers else np.zeros(size - _CAPACITY)
            self._send(torch.from_numpy(rest))
            found += rest.tolist()
        return found[:size]

    def _send(self, message: Tensor) -> None:
        dist.broadcast(message, self._mesh.last_rank, self._mesh.pipeline_group)

    def _broadcast_object(self, value: Any, what: str) -> Any:
        mesh = self._mesh
        return broadcast_object(value, what, mesh.last_rank, mesh.pipeline_group, self._device)

    def _replay(self, structure: list[Any], values: Tensor, totals: list[float]) -> None:
        for (name, given, metric, dtype), number, total in zip(
            structure, values, totals, strict=True
        ):
            arguments = dict(given)
            if arguments.pop("batch_size"):
                arguments["batch_size"] = int(total)
            if self._mesh.sizes.data == 1:
                arguments["sync_dist"] = True  # equal on all ranks: Lightning need not warn
            value: Any = number.to(dtype or torch.get_default_dtype())
            if metric is not None:
                logged: Any = self._module.get_submodule(metric)
                cache = value.to(torch.get_default_dtype()) if dtype is not None else None
                logged._forward_cache, value = cache, logged
            self._module.log(name, value, **arguments)


def _identity(structure: Any) -> int:
    return zlib.crc32(repr(structure).encode()) or 1
