"""What a step and its calls leave on submodules, beside parameters, buffers and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.boundary import leaves_of
from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import version_of
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.pending import tensors


def modes_of(module: nn.Module) -> Hashable:
    """Whether each module trains and each parameter wants a gradient."""
    return (
        tuple(child.training for child in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
    )


def manner_of(module: LightningModule) -> tuple[Any, ...]:
    """Modes, flags and plain attributes of all submodules: what a step may change before a call."""
    return (
        tuple(parameter.requires_grad for parameter in module.parameters()),
        tuple(
            (name, key, value)
            for name, child in module.named_modules()
            for key, value in child.__dict__.items()
            if (name or key == "training") and type(value) in (bool, int, float, str)
        ),
    )


PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
"""Types of values in which there are no tensors."""


class LeakError(StepError):
    """A step uses what a call has left behind.

    It shows only as long as the calls can run, before their weights are placed.
    """


class Leftovers:
    """Tensors that calls leave elsewhere than in what they return.

    That is in attributes of submodules, or by way of a hook, a list or any other object. Only the
    ranks that run a part of the call have them, so that no other code may read them.

    Args:
        module: The LightningModule; what is on itself is known on every rank.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._before: dict[str, tuple[int, int]] = {}
        self._given: set[int] = set()
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._call = ""
        self.read: str | None = None
        self.leaked: tuple[Tensor, str] | None = None
        self.logged_in: str | None = None

    def begin(self, name: str, called: nn.Module, arguments: Any) -> None:
        """Notes what is there before a call."""
        self._call = f"self.{name}" if name else "self"
        self._given = {id(tensor) for tensor in tensors(arguments)}
        self._before = {path: (id(t), version_of(t)) for path, t in self._tensors(name, called)}

    def note_made(self, given: Any, out: Any) -> None:
        """Notes what a function has made, in a call, of the call's arguments and parameters.

        Args:
            given: Arguments of the function. What is made of none of these is a constant, which
                other ranks make as well.
            out: What it gives.
        """
        sources = tensors(given)
        depends = any(
            isinstance(t, nn.Parameter) or id(t) in self._given or self._maker(t) for t in sources
        )
        for tensor in tensors(out):
            if (depends or tensor.requires_grad) and not any(tensor is t for t in sources):
                self._made[id(tensor)] = weakref.ref(tensor), self._call

    def _maker(self, tensor: Tensor) -> str | None:
        """The call in which ``tensor`` was made."""
        found, call = self._made.get(id(tensor), (None, None))
        return call if found is not None and found() is tensor else None

    def end(self, name: str, called: nn.Module, out: Any) -> None:
        """Notes what the call has left, beside its output."""
        opaque = [x for x in pytree.tree_leaves(out) if not isinstance(x, (Tensor, *PLAIN))]
        if opaque:  # such as a distribution, which has tensors of the call where nobody looks
            self._made = {key: made for key, made in self._made.items() if made[1] != self._call}
        for path, tensor in self._tensors(name, called):
            if self._before.get(path) != (id(tensor), version_of(tensor)):
                self._names[id(tensor)] = path
                self._kept.append(tensor)

    def _tensors(self, name: str, called: nn.Module) -> list[tuple[str, Tensor]]:
        return [
            (".".join(part for part in ("self", name, where, key) if part), value)
            for where, child in called.named_modules()
            for key, value in child.__dict__.items()
            if child is not self._module and isinstance(value, Tensor)
        ]

    def look(self, tree: Any) -> None:
        """Notes whether the step's own code has one of them in ``tree``."""
        if self.read is not None or self.leaked is not None:
            return
        for tensor in tensors(tree):
            if id(tensor) in self._names:
                self.read = self._names[id(tensor)]
            elif (call := self._maker(tensor)) is not None:
                self.leaked = tensor, call

    def refuse(self, step: str) -> None:
        """Refuses what other ranks would not have.

        Raises:
            LeakError: If the step reads such a tensor, or a called module logs.
        """
        if self.read is not None:
            raise LeakError(
                f"{step} reads the tensor {self.read}, which a call has left there. Only the rank "
                "that runs this part of the call has it. Let the forward return it, up to the step."
            )
        if self.leaked is not None:
            raise self._leak(step, *self.leaked)
        if self.logged_in is not None:
            raise LeakError(
                f"The forward of {self.logged_in} logs, which only the rank that runs it would "
                f"know of. Let it return the value and log that in {step}, or in the "
                "LightningModule's own forward."
            )

    def _leak(self, step: str, tensor: Tensor, call: str) -> LeakError:
        reached = leaves_of([tensor])
        # The last one, for the tensor was made behind it and depends on many before.
        names = [name for name, p in self._module.named_parameters() if id(p) in reached]
        which = f" It depends on self.{names[-1]}." if names else ""
        return LeakError(
            f"{step} uses a tensor of shape {tuple(tensor.shape)} that was made inside of {call} "
            "and is no part of what that returns: it came by way of a hook, a list or an attribute "
            f"of some object.{which} Only the rank that runs this part of the call has it. Let the "
            "forward return it, up to the step."
        )
