"""What containers and generators of random numbers hold at one time, and how it is put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.errors import StepError

SMALL = 1 << 14
"""Numbers in a tensor, and entries of a container, up to which it is copied whatever it is for."""

_CONTAINERS = (list, dict, set, deque, np.ndarray, SimpleNamespace)
_RANDOM = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)
SCANNED = (Tensor, *_CONTAINERS, *_RANDOM)
"""Types of values that can change in themselves."""


@dataclass
class Contents:
    """What containers, generators of random numbers and tensors in containers were.

    Attributes:
        containers: Each with what it held, or with how much if that is a lot, and its name.
        generators: Each with its state.
        tensors: Each with its version and the name of what holds it.
    """

    containers: list[tuple[Any, Any, str]] = field(default_factory=list)
    generators: list[tuple[Any, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int, str]] = field(default_factory=list)

    def add(self, value: Any, where: str, seen: set[int]) -> None:
        """Looks at ``value`` and at what is in it."""
        if isinstance(value, SimpleNamespace):
            value = vars(value)
        if id(value) in seen:
            return
        if isinstance(value, Tensor):
            if type(value) is Tensor and not value.is_inference():
                self.tensors.append((value, value._version, where))
        elif isinstance(value, _RANDOM):
            seen.add(id(value))
            self.generators.append((value, _state_of(value)))
        elif isinstance(value, _CONTAINERS):
            seen.add(id(value))
            size = value.size if isinstance(value, np.ndarray) else len(value)
            if size > SMALL:
                self.containers.append((value, len(value), where))
                return
            content = _content(value)
            self.containers.append((value, content, where))
            if isinstance(value, np.ndarray):
                return
            for item in content.values() if isinstance(content, dict) else content:
                if isinstance(item, SCANNED):
                    self.add(item, where, seen)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Puts all back for the block, and what is there now behind it."""
        now = [(value, _content(value, old)) for value, old, _ in self.containers]
        states = [(generator, _state_of(generator)) for generator, _ in self.generators]
        for value, old, where in self.containers:
            _fill(value, old, where)
        for generator, state in self.generators:
            _set_state(generator, state)
        try:
            yield
        finally:
            for value, old in now:
                _fill(value, old)
            for generator, state in states:
                _set_state(generator, state)


def _content(value: Any, like: Any = None) -> Any:
    if type(like) is int:  # what came behind the first ones
        return (like, value[like:]) if isinstance(value, list) else len(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return dict(value) if isinstance(value, dict) else list(value)


def _fill(value: Any, content: Any, where: str = "") -> None:
    if isinstance(content, tuple):
        value[content[0] :] = content[1]
    elif type(content) is int:
        if isinstance(value, list) and len(value) >= content:
            del value[content:]
        elif len(value) != content:
            raise lost(where, "is a large container that changed its size")
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif not _is_same(value, content):
        if isinstance(value, list):
            value[:] = content
            return
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


def _is_same(value: Any, content: Any) -> bool:
    same = len(value) == len(content) and all(map(is_, value, content))
    if not isinstance(value, dict):
        return same
    return same and all(map(is_, value.values(), content.values()))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    is_python = isinstance(generator, random.Random)
    return generator.getstate() if is_python else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def lost(where: str, what: str) -> StepError:
    return StepError(
        f"{where} {what} since a call began whose activations are computed again, so what it began "
        "with is not known any more. Set the attribute to a new value instead of changing it in "
        "place, or say activation_checkpointing='none'."
    )
