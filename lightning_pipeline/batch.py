"""Cutting a batch into microbatches and telling batches apart."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_pipeline import transfers
from lightning_pipeline.errors import StepError
from lightning_pipeline.mappings import with_values
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.transfers import Readback

_SAMPLES = 64


@dataclass(frozen=True)
class Cut:
    """How the rows of one batch are dealt out.

    Attributes:
        sizes: Rows of each microbatch that holds data; they differ by at most one.
        total: Number of microbatches of the schedule; the surplus is not computed and sends zeros.
        others: Rows of each microbatch in the batches of further loaders, where they differ.
    """

    sizes: tuple[int, ...]
    total: int
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def all_sizes(self) -> list[tuple[int, ...]]:
        """Rows of each microbatch for every loader, the first one's first."""
        return [self.sizes, *self.others]

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def share(self, index: int) -> float:
        """Share of microbatch ``index`` in the batch, 0 for a filler."""
        return self.sizes[index] / self.rows if index < len(self.sizes) else 0.0

    def is_filler(self, index: int) -> bool:
        return index >= len(self.sizes)


def even_cut(rows: int, real: int, total: int) -> Cut:
    """Deals ``rows`` out to ``real`` microbatches as evenly as whole rows allow."""
    base, rest = divmod(rows, real)
    return Cut(tuple(base + (index < rest) for index in range(real)), total)


_LEAVES = frozenset([Tensor, bool, int, float, str, bytes, type(None)])


def parts_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Children of a container and what makes a container of them; ``None`` for a leaf."""
    kind = type(value)
    if kind in _LEAVES:
        return None
    if kind is list or kind is tuple:
        return list(value), kind
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda new: dict(zip(keys, new, strict=True))
    if _is_tensor_collection(value):
        names = list(value.keys())
        return [value.get(name) for name in names], lambda new: _with_entries(value, names, new)
    # By number: torch's function is part of a cycle, with all that the question refers to.
    number = id(value)
    children, spec = pytree.tree_flatten(value, is_leaf=lambda node: id(node) != number)
    if len(children) != 1 or children[0] is not value:
        return children, lambda new: pytree.tree_unflatten(new, spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data: Any = value
        names = [field.name for field in dataclasses.fields(data) if field.init]
        return [getattr(data, name) for name in names], lambda new: dataclasses.replace(
            data, **dict(zip(names, new, strict=True))
        )
    if isinstance(value, MutableMapping):
        return list(value.values()), lambda new: with_values(value, new)
    return None


def _is_tensor_collection(value: Any) -> bool:
    """Whether ``value`` is a TensorDict or a tensorclass, known without importing tensordict."""
    return hasattr(type(value), "batch_size") and isinstance(value.batch_size, torch.Size)


def _with_entries(collection: Any, names: list[str], values: list[Any]) -> Any:
    """A TensorDict or tensorclass with other values, which may have another number of rows."""
    new, shape = collection.clone(recurse=False), collection.batch_size
    counted = [value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim]
    new.batch_size = []
    for name, value in zip(names, values, strict=True):
        plain = _is_tensor_collection(value) and not value.keys()  # a text, with rows of its own
        new.set(name, value.data if plain else value)
    new.batch_size = [*(counted[:1] or shape[:1]), *shape[1:]] if shape else []
    return new


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in ``batch`` that is no container, depth first."""
    parts = parts_of(batch)
    if parts is None:
        yield batch
    else:
        for child in parts[0]:
            yield from leaves(child)


def copied(batch: Any) -> Any:
    """``batch`` with every tensor cloned, so that a step may write to it."""
    parts = parts_of(batch)
    if parts is not None:
        return parts[1]([copied(child) for child in parts[0]])
    if isinstance(batch, np.ndarray):
        return batch.copy()
    return batch.detach().clone() if isinstance(batch, Tensor) else batch


def _is_list_of_samples(value: Any, top: bool, counted: Collection[int] = ()) -> bool:
    """Whether a list holds one entry a sample, as collate functions for images of all sizes make.

    A list inside the batch of dicts, or of tensors that do not stack, is one; a list of tensors of
    one shape may as well be several inputs and is not.

    Args:
        value: The list.
        top: Whether it is the batch itself.
        counted: First dims of the batch's other tensors. If those in the list share one of them,
            and the list has another length, they are several inputs (features of an image).
    """
    if top or type(value) is not list or not value:
        return False
    if all(isinstance(item, Mapping) for item in value):
        return True
    if not all(isinstance(item, (Tensor, np.ndarray)) for item in value):
        return False
    first_dims = {item.shape[0] if item.ndim else 0 for item in value}
    if len(first_dims) == 1 and first_dims.isdisjoint({len(value)}) and first_dims <= {*counted}:
        return False
    return len({tuple(item.shape) for item in value}) > 1


def _first_dims(batch: Any) -> set[int]:
    """First dims of the tensors that are in no list of samples."""
    return {size for kind, size in _votes(batch, ()) if kind == "tensors"}


def _votes(value: Any, counted: Collection[int], top: bool = True) -> Iterator[tuple[str, int]]:
    """Kind and size of everything that may count the samples."""
    if _is_list_of_samples(value, top, counted):
        yield "samples", len(value)
    elif isinstance(value, (Tensor, np.ndarray)):
        if value.ndim and value.shape[0]:
            yield "tensors" if isinstance(value, Tensor) else "arrays", int(value.shape[0])
    elif type(value) in (list, tuple) and value and not any(map(_holds_tensors, value)):
        yield "values", len(value)
    elif (parts := parts_of(value)) is not None:
        for child in parts[0]:
            yield from _votes(child, counted, top=False)


def num_rows(batch: Any, step: str) -> int:
    """Number of samples in ``batch``: the leading size that most of its tensors share.

    Raises:
        StepError: If nothing counts samples, two sizes are equally frequent, or something in the
            batch cannot be cut.
    """
    _refuse_uncuttable(batch, step)
    votes = list(_votes(batch, _first_dims(batch)))
    for kind in ("samples", "tensors", "arrays", "values"):
        sizes = Counter(size for voted, size in votes if voted == kind).most_common(2)
        if len(sizes) == 2 and sizes[0][1] == sizes[1][1]:
            raise StepError(
                f"{step} got a batch in which {sizes[0][0]} and {sizes[1][0]} are equally frequent "
                "as first dim, so it is not clear which one counts the samples and is cut into "
                "microbatches. Bring the samples to the first dim of every tensor, and what is no "
                "sample into the LightningModule, in on_after_batch_transfer or the collate_fn."
            )
        if sizes:
            return sizes[0][0]
    raise StepError(
        f"{step} got a batch without a tensor whose first dim counts samples (its type is "
        f"{type(batch).__name__}), so it cannot be cut into microbatches. Turn it into tensors in "
        "LightningModule.on_after_batch_transfer or in the DataLoader's collate_fn."
    )


def _refuse_uncuttable(value: Any, step: str) -> None:
    """Refuses tensors without rows to slice, and tensors in objects that nobody can look into."""
    what = None
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:
            what = f"a {'nested' if value.is_nested else str(value.layout)} tensor"
            cure = "Make it dense, e.g. x.to_dense() or torch.nested.to_padded_tensor(x, 0.0)"
    elif isinstance(value, PackedSequence):
        what = "a PackedSequence, whose rows are time steps"
        cure = "Give the padded tensor and the lengths (the step may pack them)"
    elif (parts := parts_of(value)) is not None:
        for child in parts[0]:
            _refuse_uncuttable(child, step)
    elif not isinstance(value, np.ndarray) and _hides_tensors(value):
        what = f"an object of type {type(value).__name__}, of which it knows no samples"
        cure = "Take its tensors out, e.g. {'x': batch.x, 'y': batch.y}"
    if what is not None:
        raise StepError(
            f"{step} got {what}, so the batch cannot be cut into microbatches. {cure}, in "
            "LightningModule.on_after_batch_transfer, transfer_batch_to_device or the DataLoader's "
            "collate_fn: tensors, arrays and lists in dicts, tuples and dataclasses are cut."
        )


def _hides_tensors(value: Any) -> bool:
    """Whether something that is no known container holds tensors."""
    if callable(getattr(value, "to", None)):
        return True  # Lightning moves it to the device
    inside = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        inside += [*value.values()] if isinstance(value, Mapping) else [*value]
    return any(isinstance(item, Tensor) for item in inside)


def cut_batch(batch: Any, cut: Cut) -> list[Any]:
    """Cuts ``batch`` into ``cut.total`` microbatches.

    Tensors and arrays whose first dim counts the samples are sliced (views), and so are lists of
    samples and lists and tuples of plain values of that length; everything else goes whole into
    every microbatch.
    """
    knife = _Knife(cut.rows, _first_dims(batch))
    microbatches, start = [], 0
    for size in cut.sizes:
        microbatches.append(knife(batch, slice(start, start + size)))
        start += size
    fillers = [microbatches[0]] * (cut.total - len(microbatches))
    return microbatches + fillers


@dataclass(frozen=True)
class _Knife:
    """Takes rows out of a batch.

    Attributes:
        rows: Number of the batch's samples.
        counted: First dims of its tensors.
    """

    rows: int
    counted: Collection[int]

    def __call__(self, value: Any, which: slice, top: bool = True) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return value[which] if value.ndim and value.shape[0] == self.rows else value
        if _is_tensor_collection(value) and value.batch_size[:1] == (self.rows,):
            return value[which]  # it knows what else belongs to its rows
        if type(value) in (list, tuple) and len(value) == self.rows:
            plain = not any(map(_holds_tensors, value))
            if plain or _is_list_of_samples(value, top, self.counted):
                return value[which]
        parts = parts_of(value)
        if parts is None:
            return value
        return parts[1]([self(child, which, top=False) for child in parts[0]])


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves(value))


def signature(batch: Any) -> Hashable:
    """Shapes, dtypes and structure of a microbatch; plain values may differ."""
    parts = parts_of(batch)
    if parts is not None:
        keys = tuple(batch.keys()) if isinstance(batch, Mapping) else ()
        return batch.__class__, keys, tuple(signature(child) for child in parts[0])
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.__class__, tuple(batch.shape), batch.dtype
    return (batch.__class__,)


def checksum(batch: Any) -> int:
    """CRC-32 of sampled elements of every tensor and array in ``batch``, and of its texts.

    Equal batches give equal numbers.
    """
    crc, elsewhere = checksum_of_host(batch)
    return checksum_of_samples(elsewhere, crc)


def checksum_of_samples(samples: Iterable[Readback], crc: int = 0) -> int:
    """CRC-32 of samples that have come from devices, behind ``crc``."""
    for found in samples:
        crc = zlib.crc32(found.wait().numpy().tobytes(), crc)
    return crc


def checksum_of_host(batch: Any) -> tuple[int, list[Readback]]:
    """What the host knows of ``batch``, for which it waits for no device.

    Returns:
        CRC-32 of shapes, dtypes and texts, and of sampled elements on the host; and the samples of
        all tensors on each device, on their way.
    """
    crc, shapes = 0, []
    samples: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
    for leaf in leaves(batch):
        if isinstance(leaf, str):
            crc = zlib.crc32(leaf[:_SAMPLES].encode(errors="replace"), crc)
        elif isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            shapes.append((tuple(leaf.shape), str(leaf.dtype)))
            kinds = samples.setdefault(leaf.device, {})
            kinds.setdefault(leaf.dtype, []).append(_samples(leaf))
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            shapes.append((leaf.shape, str(leaf.dtype)))
            crc = zlib.crc32(np.ascontiguousarray(_samples_of_array(leaf)).tobytes(), crc)
    crc, elsewhere = zlib.crc32(repr(shapes).encode(), crc), []
    with torch.no_grad():
        for device, kinds in samples.items():
            joined = torch.cat([torch.cat(found).view(torch.uint8) for found in kinds.values()])
            if transfers.is_host(device):
                crc = zlib.crc32(joined.numpy().tobytes(), crc)
            else:
                elsewhere.append(Readback(joined))
    return crc, elsewhere


def _samples(tensor: Tensor) -> Tensor:
    """At most so many elements of a tensor, from all over it, in one dim."""
    count = tensor.numel()
    step = max(1, count // _SAMPLES)
    if not tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    # One call: batches may have many tensors.
    return tensor.detach().as_strided((min(count, _SAMPLES),), (step,))


def _samples_of_array(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES]
