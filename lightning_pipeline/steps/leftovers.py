"""What a step and its calls leave on submodules, beside parameters, buffers and outputs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import version_of
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


class Leftovers:
    """Tensors that calls leave in attributes of submodules.

    Only the ranks that run a part of the call have them, so that no other code may read them.

    Args:
        module: The LightningModule; what is on itself is known on every rank.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._before: dict[str, tuple[int, int]] = {}
        self.read: str | None = None
        self.logged_in: str | None = None

    def begin(self, name: str, called: nn.Module) -> None:
        """Notes what is there before a call."""
        self._before = {path: (id(t), version_of(t)) for path, t in self._tensors(name, called)}

    def end(self, name: str, called: nn.Module) -> None:
        """Notes what the call has left."""
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
        if self._names and self.read is None:
            found = (self._names.get(id(tensor)) for tensor in tensors(tree))
            self.read = next((name for name in found if name is not None), None)

    def refuse(self, step: str) -> None:
        """Refuses what other ranks would not have.

        Raises:
            StepError: If the step reads such a tensor, or a called module logs.
        """
        if self.read is not None:
            raise StepError(
                f"{step} reads the tensor {self.read}, which a call has left there. Only the rank "
                "that runs this part of the call has it. Let the forward return it, up to the step."
            )
        if self.logged_in is not None:
            raise StepError(
                f"The forward of {self.logged_in} logs, which only the rank that runs it would "
                f"know of. Let it return the value and log that in {step}, or in the "
                "LightningModule's own forward."
            )
