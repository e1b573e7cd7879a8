"""Settings around an operation that change what it does: autograd, autocast, attention kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch

from lightning_pipeline.splitting.settings import frozen

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
    return random.getstate(), _numpy_state()


def _numpy_state() -> Hashable:
    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is np.random.MT19937 and _memory_is_known():
        return _memory(generator)
    return frozen(generator.state)


def _memory(generator: np.random.MT19937) -> bytes:
    """The 624 words and the position, in 1 us instead of the 50 of ``generator.state``."""
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


@functools.cache
def _memory_is_known() -> bool:
    """Whether this NumPy keeps in memory what the public state shows, in this order."""
    generator = np.random.MT19937(0)
    generator.random_raw(1000)
    state = generator.state["state"]
    shown = np.append(state["key"], state["pos"]).astype(np.uint32)
    return _memory(generator) == shown.tobytes()


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
