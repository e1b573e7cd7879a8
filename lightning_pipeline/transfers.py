"""Numbers between the host and the device, on ways that wait for nothing.

A copy from the device into pageable memory waits for all that the stream has been given, and so
does torch with a copy to the device that it makes of a Python number. A fill does not wait, nor
does a copy into pinned memory, which is work of the stream like any other: only who reads it waits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """Whether reading a tensor on ``device`` waits for nothing."""
    return device.type == "cpu"


class Readback:
    """A copy of a tensor for the host, under way while the host goes on.

    Args:
        tensor: What to read, of any shape.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._event = tensor.detach(), None
        if not tensor.is_cpu:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, when it has come: behind what the stream was given before it set out."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy


def placed(number: Tensor, device: torch.device) -> Tensor:
    """``number``, a single one of shape [], on ``device``; one of the host is filled in."""
    if number.device == device or (is_host(number.device) and is_host(device)):
        return number
    if number.is_cpu:
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device)
