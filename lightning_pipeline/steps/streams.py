"""Random number streams of a step: equal on every stage, whatever part of the step runs there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """Folds ``numbers`` into one seed in [0, 2**63), different for different tuples."""
    seed = 1442695040888963407
    for number in numbers:
        seed = ((seed ^ (number & _MASK)) * _MULTIPLIER + 1) & _MASK
        seed ^= seed >> 29
    return seed


def _generators(device: torch.device | None) -> list[torch.Generator]:
    if device is None or device.type != "cuda":
        return []
    return [torch.cuda.default_generators[device.index or 0]]


def random_state(device: torch.device | None = None) -> Any:
    """State of the generators of torch on the host, NumPy and Python, and of ``device``."""
    states = [generator.get_state() for generator in _generators(device)]
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), *states


def set_random_state(state: Any, device: torch.device | None = None) -> None:
    """Goes on from a state that ``random_state`` gave."""
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    for generator, of_device in zip(_generators(device), state[3:], strict=True):
        generator.set_state(of_device)


@contextmanager
def resumed(state: Any, device: torch.device) -> Iterator[None]:
    """Runs the block on the generators as they were in ``state`` and puts the present ones back."""
    now = random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(now, device)


def seed_all(seed: int, device: torch.device) -> None:
    """Begins new streams of torch, NumPy and Python.

    Args:
        seed: Any non-negative integer.
        device: The rank's device, whose generator is seeded beside the host's.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed formats a stack trace for devices that are not initialised: 1 ms a call.
    for generator in (torch.default_generator, *_generators(device)):
        generator.manual_seed(seed)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Goes on behind the block from where the generators were."""
    outer = random_state(device)
    try:
        yield
    finally:
        set_random_state(outer, device)


@contextmanager
def stream(seed: int, device: torch.device) -> Iterator[None]:
    """Runs the block on fresh torch, numpy and Python generators and puts the outer ones back.

    Args:
        seed: Seed of the block's generators, any non-negative integer.
        device: The rank's device; its generator is forked beside the CPU's.
    """
    with kept_random_state(device):
        seed_all(seed, device)
        yield
