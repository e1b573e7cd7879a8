"""Settings around an operation that change what it does: autograd, autocast, attention kernels."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Setting = tuple[str, Any]
AUTOCAST_DEVICES = ("cpu", "cuda")
KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def ambient_settings() -> tuple[Setting, ...]:
    """The settings in force, as comparable pairs of name and value."""
    kernels = tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in KERNELS)
    return (
        ("grad", torch.is_grad_enabled()),
        ("inference", torch.is_inference_mode_enabled()),
        ("default_dtype", torch.get_default_dtype()),
        ("attention_kernels", kernels),
        *(
            (device, (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            for device in AUTOCAST_DEVICES
        ),
    )


def changed(now: tuple[Setting, ...], start: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """The settings of ``now`` that differ from those of ``start``."""
    return tuple(a for a, b in zip(now, start, strict=True) if a != b)


def outside_state() -> tuple[Any, ...]:
    """State of the random generators that torch does not know of."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), position


def seeds() -> tuple[int, ...]:
    """What torch's generators were last seeded with; on fake tensors nothing else moves them."""
    known = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return torch.initial_seed(), *(generator.initial_seed() for generator in known)


@contextlib.contextmanager
def restored(settings: tuple[Setting, ...]) -> Iterator[None]:
    """Run a block under recorded settings; those that are not mentioned stay as they are."""
    with contextlib.ExitStack() as stack:
        for name, value in settings:
            stack.enter_context(_context(name, value))
        yield


def _context(name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    if name == "grad":
        return torch.set_grad_enabled(value)
    if name == "inference":
        return torch.inference_mode(value)
    if name == "default_dtype":
        return _default_dtype(value)
    if name == "attention_kernels":
        return _attention_kernels(value)
    enabled, dtype = value
    return torch.autocast(name, enabled=enabled, dtype=dtype)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _attention_kernels(enabled: tuple[bool, ...]) -> Iterator[None]:
    def switch(values: tuple[bool, ...]) -> None:
        for name, value in zip(KERNELS, values, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)

    before = tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in KERNELS)
    switch(enabled)
    try:
        yield
    finally:
        switch(before)
