"""Prediction writers: each replica writes its share once, as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_pipeline.mesh import Mesh, Scope

_METHODS = ("write_on_batch_end", "write_on_epoch_end")


class Writers:
    """Lets the ranks of the last stages alone write predictions.

    Other ranks know the same predictions and would write them again, under their own rank's name.

    Args:
        callbacks: Callbacks of the Trainer.
        mesh: The rank's place, groups built.
    """

    def __init__(self, callbacks: Iterable[Callback], mesh: Mesh) -> None:
        self._mesh = mesh
        self._writers = [c for c in callbacks if isinstance(c, BasePredictionWriter)]
        for writer in self._writers:
            for name in _METHODS:
                writer.__dict__[name] = self._gate(getattr(writer, name))

    def remove(self) -> None:
        """Gives the writers their own methods back."""
        for writer in self._writers:
            for name in _METHODS:
                writer.__dict__.pop(name, None)
        self._writers = []

    def _gate(self, write: Callable[..., None]) -> Callable[..., None]:
        def gated(*args: Any, **kwargs: Any) -> None:
            if self._mesh.is_last:
                with self._mesh.within(Scope.REPLICAS):  # nobody else is there to be waited for
                    write(*args, **kwargs)

        return gated
