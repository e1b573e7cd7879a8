"""What would wait for a device, noted on the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",  # item, bool, float, int, and an index that is a tensor
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "lift_fresh",  # torch.tensor and x[0] = 1.0: copies from the host
}
CALLS = ("tolist", "numpy", "cpu", "item", "__array__")
# Of numbers that are on the host anyway, and of those that have come from the device.
ON_HOST = {
    ("batch.py", "checksum_of_samples"),
    ("gradients.py", "__init__"),
    ("gradients.py", "_divisor"),
    ("gradients.py", "finish"),
    ("logs.py", "_scalar"),
    ("loaders.py", "_gather"),
    ("loaders.py", "require"),
    ("loaders.py", "require_values"),
    ("logs.py", "_tell"),
    ("messages.py", "broadcast_object"),
    ("passes.py", "check_fingerprints"),
    ("passes.py", "settle"),
    ("precision.py", "optimizer_step"),  # Adam counts steps on the host
    ("transfers.py", "placed"),
}


def caller() -> tuple[str, str, int]:
    """File, function and line of the code outside of torch that runs now."""
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename.rsplit("/", 1)[-1], frame.f_code.co_name, frame.f_lineno


class Watch(TorchDispatchMode):
    """Notes operations that a device waits in."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name in READS or masks) and caller()[:2] not in ON_HOST:
            self.found.append(f"{name} at {caller()}")
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Notes methods that read, of which the host's own tensors tell no dispatcher."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in CALLS and caller()[:2] not in ON_HOST:
            self.found.append(f"{name} at {caller()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(found: list[str]) -> Iterator[None]:
    """Notes in ``found`` what the block reads of tensors, or copies to them from the host."""
    with Watch(found), Calls(found):
        yield
