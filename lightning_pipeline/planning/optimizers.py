"""What an optimizer keeps of each parameter, found by a step of a twin without memory."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.splitting.torch_private import pytree


def state_bytes(optimizers: Iterable[Optimizer]) -> tuple[dict[int, int], list[str]]:
    """Bytes of the optimizer state of each parameter after the first step, by identity.

    A twin of the optimizer, of the same class and with the same settings, does one step on meta
    tensors of the parameters' shapes and dtypes: what it then keeps has the true sizes, whatever
    the optimizer is, and nothing is allocated. An optimizer that reads values in its step fails
    behind the point where most have made their state; where nothing is there by then, two tensors
    of the parameter's size are assumed and a note says so.

    Args:
        optimizers: The optimizers; their parameters may be on meta. Nothing of them is changed.

    Returns:
        The bytes, and notes on what was assumed.
    """
    found: dict[int, int] = {}
    notes = []
    for optimizer in optimizers:
        originals, twin = _twin(optimizer)
        failed = _step(twin)
        assumed = False
        for original, own in originals:
            if not original.requires_grad:
                found[id(original)] = 0
                continue
            state = twin.state.get(own)
            assumed |= failed and not state
            size = 2 * _nbytes(own) if failed and not state else _state_bytes(state)
            found[id(original)] = size
        if assumed:
            notes.append(
                f"{type(optimizer).__name__} cannot step without values: its state is taken to be "
                "two tensors of each parameter's size"
            )
    return found, notes


def _twin(optimizer: Optimizer) -> tuple[list[tuple[nn.Parameter, nn.Parameter]], Optimizer]:
    """Pairs of a parameter and its stand-in, and the optimizer of the stand-ins."""
    originals = [p for group in optimizer.param_groups for p in group["params"]]
    own = {id(parameter): _meta(parameter) for parameter in originals}

    def stand_in(value: Any) -> Any:
        """What the twin may write to in place of the optimizer's own."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in own:
            return own[id(value)]
        # A number of steps, say, is read by some.
        return torch.empty_like(value, device="meta") if value.dim() else value.detach().clone()

    twin = copy.copy(optimizer)
    for name, value in optimizer.__dict__.items():
        if name not in ("param_groups", "state"):
            twin.__dict__[name] = pytree.tree_map(stand_in, value)
    twin.param_groups, twin.state = [], defaultdict(dict)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for group in optimizer.param_groups:
        # The loops for one tensor after another are those that run on meta.
        settings = ("foreach", "fused", "capturable")
        plain: dict[str, Any] = {key: False for key in settings if key in group}
        twin.param_groups.append(pytree.tree_map(stand_in, {**group, **plain}))
    for parameter in originals:  # made in the constructor, or loaded
        if parameter in optimizer.state:
            state = pytree.tree_map(stand_in, dict(optimizer.state[parameter]))
            twin.state[own[id(parameter)]] = state
    return [(parameter, own[id(parameter)]) for parameter in originals], twin


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    twin = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.empty_like(twin)
    return twin


def _step(twin: Optimizer) -> bool:
    """Whether a step failed. The class's own: what a scheduler puts before it counts steps."""
    try:
        type(twin).step(twin)
    except Exception:
        return True
    return False


def _state_bytes(state: Any) -> int:
    return sum(_nbytes(value) for value in (state or {}).values() if isinstance(value, Tensor))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
