"""Norms and limits of the whole model's gradients, wherever clipping or a log asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_pipeline.mesh import Mesh
from lightning_pipeline.placing import Held
from lightning_pipeline.splitting.torch_private import total_norm
from lightning_pipeline.transfers import placed


class _Redirected:
    """A function whose code calls another one for a while.

    Users import the function itself, so a function in its place would not be seen.

    Args:
        function: The function, with no closure.
        name: A free name in its module, under which the code finds ``instead``.
        code: A function of the same arguments that passes them on to ``name``.
        instead: What shall be called.
    """

    def __init__(self, function: Any, name: str, code: Any, instead: Callable[..., Any]) -> None:
        self._function, self._name, self._code = function, name, function.__code__
        names = function.__globals__
        self.original = FunctionType(self._code, names, argdefs=function.__defaults__)
        names[name] = instead
        function.__code__ = code.__code__

    def undo(self) -> None:
        """Gives the function its own code back."""
        self._function.__code__ = self._code
        del self._function.__globals__[self._name]


class WholeNorm:
    """Lets ``clip_grad_norm_``, ``get_total_norm`` and Lightning's ``grad_norm`` see all stages.

    The Trainer's clipping ends there, and so do a user's own clipping and logs of norms in a hook.
    Every rank of a pipeline runs the same hooks, so they meet in one sum. ``clip_grad_value_``
    needs no sum, but torch's fails where there is no gradient, as on a rank whose stages are
    frozen. What is redirected while a fit lasts is a private function of torch 2.13,
    ``clip_grad_value_`` and Lightning's ``grad_norm``.

    Args:
        mesh: The rank's place, groups built.
        held: What this rank holds; ``None`` before the first batch.
        device: The rank's device.
    """

    def __init__(self, mesh: Mesh, held: Callable[[], Held | None], device: torch.device) -> None:
        self._mesh, self._held, self._device = mesh, held, device
        torchs = total_norm.__wrapped__  # type: ignore[attr-defined]
        self._total_norm = _Redirected(torchs, "_whole_norm", _pass_on_total_norm, self)
        self._grad_norm = _Redirected(
            grads.grad_norm, "_whole_grad_norm", _pass_on_grad_norm, self.grad_norm
        )

        values = clip_grad.clip_grad_value_.__wrapped__  # type: ignore[attr-defined]
        self._clip_value = _Redirected(
            values, "_clip_value_of_part", _pass_on_clip_value, self.clip_value
        )

    def remove(self) -> None:
        """Gives torch and Lightning their own functions back."""
        self._clip_value.undo()
        self._total_norm.undo()
        self._grad_norm.undo()

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
            return self._total_norm.original(given, norm_type, error_if_nonfinite, foreach)
        own = [tensor for tensor in given if counted[id(tensor)]]
        local = self._total_norm.original(own, norm_type, False, foreach)
        total = self._combined(placed(local, self._device).double(), float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all stages is {total}, "
                "so they cannot be clipped. Set error_if_nonfinite=False to scale them anyway."
            )
        return total if not given else total.to(given[0].device, given[0].dtype)

    def clip_value(self, parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        """``clip_grad_value_`` of parameters that may all be elsewhere or frozen."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._held() is None or any(parameter.grad is not None for parameter in given):
            self._clip_value.original(given, clip_value, foreach)

    def grad_norm(
        self, module: nn.Module, norm_type: float | str, group_separator: str = "/"
    ) -> dict[str, Any]:
        """Lightning's ``grad_norm`` of a module whose parameters may be on several stages."""
        held = self._held()
        if held is None:
            return self._grad_norm.original(module, norm_type, group_separator)
        order = float(norm_type)
        named = dict(module.named_parameters())
        # norm, and whether there is a gradient: sums over the pipeline
        found = torch.zeros(2, len(named), dtype=torch.float64, device=self._device)
        for index, parameter in enumerate(named.values()):
            if parameter.grad is not None and held.counted_here.get(id(parameter)):
                found[0, index] = parameter.grad.data.norm(order)
                found[1, index].fill_(1)
        dist.all_reduce(found, group=self._mesh.pipeline_group)
        measured = [
            (name, _Measured(norm.to(parameter.dtype)))
            for (name, parameter), norm, given in zip(
                named.items(), found[0], found[1].tolist(), strict=True
            )
            if given
        ]
        return self._grad_norm.original(_Measures(measured), norm_type, group_separator)

    def _combined(self, local: Tensor, order: float) -> Tensor:
        group = self._mesh.pipeline_group
        if math.isinf(order):
            dist.all_reduce(local, dist.ReduceOp.MAX, group)
            return local
        power = local if order == 0 else local**order
        dist.all_reduce(power, dist.ReduceOp.SUM, group)
        return power if order == 0 else power ** (1 / order)


class _Measures:
    """Stands for a module."""

    def __init__(self, measured: list[tuple[str, _Measured]]) -> None:
        self._measured = measured

    def named_parameters(self) -> list[tuple[str, _Measured]]:
        return self._measured


class _Measured:
    """Stands for a parameter whose gradient's norm is known."""

    def __init__(self, norm: Tensor) -> None:
        self.grad = self.data = self
        self._norm = norm

    def norm(self, order: float) -> Tensor:
        return self._norm


# Their names are looked up in torch's and Lightning's modules.


def _pass_on_total_norm(
    tensors: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False, foreach: Any = None
) -> Any:
    return _whole_norm(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[name-defined] # noqa: F821


def _pass_on_clip_value(parameters: Any, clip_value: Any, foreach: Any = None) -> Any:
    return _clip_value_of_part(parameters, clip_value, foreach)  # type: ignore[name-defined] # noqa: F821


def _pass_on_grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
    return _whole_grad_norm(module, norm_type, group_separator)  # type: ignore[name-defined] # noqa: F821
