"""A module whose weights get memory when the first batch has told which rank holds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_pipeline.recipes import Recipes, Ref
from lightning_pipeline.splitting import (
    UNPLACED,
    StateItem,
    canonical_names,
    is_elsewhere,
    release,
    restore,
    state_items,
)
from lightning_pipeline.weights import copied


def has_no_value(tensor: Tensor) -> bool:
    """Whether a tensor is on meta and is no placeholder."""
    return tensor.is_meta and not is_elsewhere(tensor)


def is_unplaced(tensor: Tensor) -> bool:
    """Whether a tensor is a placeholder for one that no rank holds yet."""
    return is_elsewhere(tensor) and tensor.elsewhere_holders == UNPLACED


class Deferred:
    """What a module on meta gets its values from; placeholders guard it until then.

    Args:
        module: The module, some of whose parameters and buffers are on meta.
        recipes: What was noted while it was built. What is missing there, because the module was
            built before, is asked of ``reset_parameters`` and ``_init_weights``.
    """

    def __init__(self, module: nn.Module, recipes: Recipes) -> None:
        self._module, self._recipes = module, recipes
        self._values: dict[str, Tensor] = {}
        self._remake()
        self._canonical = canonical_names(module)
        self._refs = {
            item.name: Ref.of(item.tensor)
            for item in state_items(module)
            if self._canonical[item.name] == item.name and has_no_value(item.tensor)
        }
        self._names = {ref.storage: name for name, ref in reversed(self._refs.items())}
        unplaced = dict.fromkeys(self._refs, UNPLACED)
        release(module, lambda name: name not in unplaced, unplaced)

    def take(self, state: Mapping[str, Any]) -> None:
        """Notes values, which are read when the tensors are made.

        Args:
            state: Values by dotted name, on the host or as ``weights.stand_in``; those of tensors
                that have a value already are left out.

        Raises:
            RuntimeError: If a shape differs.
        """
        shapes = {name: ref.size for name, ref in self._refs.items()}
        for name, value in state.items():
            first = self._canonical.get(name)
            if first in shapes and isinstance(value, Tensor):
                if tuple(value.shape) != shapes[first]:
                    raise RuntimeError(
                        f"Size mismatch for {name}: {type(self._module).__name__} has shape "
                        f"{shapes[first]}, the checkpoint has {tuple(value.shape)}."
                    )
                self._values[first] = value

    def check(self) -> None:
        """Refuses tensors that nothing gives a value.

        Raises:
            MisconfigurationException: If there is one.
        """
        for name, ref in self._refs.items():
            if name not in self._values and not self._recipes.has(ref):
                raise _no_value(self._module, name)

    def fill(
        self,
        keep: Callable[[str], bool],
        holders: Mapping[str, tuple[int, ...]],
        device: torch.device,
        seed: int,
    ) -> None:
        """Makes the tensors that this rank holds, one by one.

        Args:
            keep: Whether this rank holds the tensor of a canonical name.
            holders: Stages that hold each tensor, by canonical name.
            device: The rank's device.
            seed: Seed of the run.
        """
        with torch.inference_mode(False), torch.no_grad():
            for item in list(state_items(self._module)):
                tensor, name = item.tensor, item.name
                if name not in self._refs or not is_unplaced(tensor):
                    continue
                assert is_elsewhere(tensor)
                if keep(name):
                    restore(tensor, self._value(name, seed).to(device, tensor.dtype))
                else:
                    tensor.elsewhere_holders = holders[name]
        self._values.clear()

    def _value(self, name: str, seed: int) -> Tensor:
        value = self._values.pop(name, None)
        if value is None:
            return self._recipes.make(self._refs[name], seed, self._names)
        return copied(value)

    def _remake(self) -> None:
        """Notes how to make what was built outside of the recipes' sight."""
        above: dict[str, nn.Module] = {}
        for prefix, owner in self._module.named_modules():
            above[prefix] = owner
            own = [t for *_, t in _own(owner) if has_no_value(t)]
            if all(self._recipes.has(Ref.of(tensor)) for tensor in own):
                continue
            with _unchanged(owner), torch.no_grad(), self._recipes.watch(hide=False):
                for name in ("reset_parameters", "_reset_parameters"):
                    if callable(getattr(owner, name, None)):
                        getattr(owner, name)()
                        break
                init = _initialiser(prefix, above)
                if init is not None:
                    init(owner)


def _own(owner: nn.Module) -> Iterator[StateItem]:
    return (item for item in state_items(owner) if item.owner is owner)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Puts back what has a value: only what has none is to be initialised."""
    real = [t for *_, t in state_items(module) if not t.is_meta and not is_lazy(t)]
    before = [t.detach().clone() for t in real]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(real, before, strict=True):
                tensor.copy_(value)


def _initialiser(prefix: str, above: Mapping[str, nn.Module]) -> Callable[[nn.Module], Any] | None:
    """``_init_weights(module)`` of the nearest module around, as transformers' models have it."""
    parts = prefix.split(".") if prefix else []
    for end in range(len(parts), -1, -1):
        init = getattr(above.get(".".join(parts[:end])), "_init_weights", None)
        if callable(init):
            needed = [
                p
                for p in inspect.signature(init).parameters.values()
                if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            if len(needed) == 1:
                return init
    return None


def _no_value(module: nn.Module, name: str) -> MisconfigurationException:
    owner = type(module.get_submodule(name.rpartition(".")[0]))
    try:
        lines = inspect.getsourcelines(owner)[1]
        place = f" ({inspect.getsourcefile(owner)}:{lines})"
    except (OSError, TypeError):
        place = ""
    return MisconfigurationException(
        f"Every parameter and buffer on meta must get a value, but nothing tells the one of "
        f"{name!r}: {owner.__name__}{place} has no reset_parameters that writes to it, and no "
        "checkpoint has it. Build the module in configure_model without torch.device('meta'), "
        f"give {owner.__name__} a method reset_parameters() that fills it, e.g. with "
        f"torch.nn.init.normal_(self.{name.rpartition('.')[2]}), or give a file with it as "
        "PipelineStrategy(weights=PATH)."
    )
