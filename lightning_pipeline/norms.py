"""The norm of the whole model's gradients, wherever clipping asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_pipeline.mesh import Mesh
from lightning_pipeline.placing import Held


class WholeNorm:
    """Lets ``torch.nn.utils.clip_grad_norm_`` see the gradients of all stages.

    The Trainer's clipping ends there, and so does a user's own in a hook. Every rank of a pipeline
    runs the same hooks, so they meet in one sum. The private function that is replaced while a fit
    lasts is that of torch 2.13.

    Args:
        mesh: The rank's place, groups built.
        held: What this rank holds; ``None`` before the first batch.
        device: The rank's device.
    """

    def __init__(self, mesh: Mesh, held: Callable[[], Held | None], device: torch.device) -> None:
        self._mesh, self._held, self._device = mesh, held, device
        self._original: Any = clip_grad._get_total_norm
        clip_grad._get_total_norm = self

    def remove(self) -> None:
        """Gives torch its own function back."""
        clip_grad._get_total_norm = self._original

    def __call__(
        self,
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Norm of ``tensors``; with those of the other stages if they are gradients of the model.

        Raises:
            RuntimeError: If it is not finite and ``error_if_nonfinite`` is set.
        """
        given, held = [tensors] if isinstance(tensors, Tensor) else list(tensors), self._held()
        counted = {} if held is None else held.gradients()
        if held is None or any(id(tensor) not in counted for tensor in given):
            return self._original(given, norm_type, error_if_nonfinite, foreach)
        own = [tensor for tensor in given if counted[id(tensor)]]
        local = self._original(own, norm_type, False, foreach)
        total = self._combined(local.to(self._device, torch.float64), float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all stages is {total}, "
                "so they cannot be clipped. Set error_if_nonfinite=False to scale them anyway."
            )
        return total if not given else total.to(given[0].device, given[0].dtype)

    def _combined(self, local: Tensor, order: float) -> Tensor:
        group = self._mesh.pipeline_group
        if math.isinf(order):
            dist.all_reduce(local, dist.ReduceOp.MAX, group)
            return local
        power = local if order == 0 else local**order
        dist.all_reduce(power, dist.ReduceOp.SUM, group)
        return power if order == 0 else power ** (1 / order)
