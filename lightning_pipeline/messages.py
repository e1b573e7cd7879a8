"""Python objects from one rank to the others of its group, errors included."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipeline.errors import StepError


def broadcast_object(
    value: Any, what: str, source: int, group: dist.ProcessGroup, device: torch.device
) -> Any:
    """Gives all ranks of a group what one of them has.

    Args:
        value: The object, on ``source``; ignored elsewhere.
        what: What it is, for the message if it cannot be sent.
        source: Global rank that has it.
        group: The group.
        device: Where this rank wants tensors that are on the device of ``source``.

    Raises:
        StepError: On all ranks, if it cannot be pickled.
    """
    box: list[Any] = [None]
    if dist.get_rank() == source:
        box = [_packed(value)]
    dist.broadcast_object_list(box, source, group)
    if isinstance(box[0], str):
        raise StepError(
            f"{what} must be known on every rank, but cannot be sent to them: {box[0]}. Return or "
            "keep tensors, arrays, numbers and texts in containers."
        )
    return value if dist.get_rank() == source else _unpacked(box[0], device)


def _packed(value: Any) -> bytes | str:
    """The object in bytes, or the reason why not."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickle raises whatever a __reduce__ raises
        return f"{type(error).__name__}: {error}"
    return buffer.getvalue()


def _unpacked(data: bytes, device: torch.device) -> Any:
    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(data), map_location=place, weights_only=False)
