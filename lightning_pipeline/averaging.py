"""Weight averaging callbacks: their copy of the module is spread over the ranks as the module is.

Lightning's callbacks copy the whole module in their ``setup`` and walk through both, parameter by
parameter. Here each rank keeps the part of the copy that belongs to its part of the module, and
the walks see what is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_pipeline.lightning_private import (
    AVERAGING_WALKS,
    average_of,
    averaging_device,
    set_averaging_device,
)
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.sharing import make_whole
from lightning_pipeline.splitting import (
    is_elsewhere,
    release,
    state_items,
)
from lightning_pipeline.steps import patched

_HOST = torch.device("cpu")


class Averages:
    """The copies of a module that weight averaging callbacks keep.

    It must be made before the callbacks are set up, so that they copy to the host: a device need
    not hold the whole model.

    Args:
        callbacks: All callbacks of the run.
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
        device: The rank's device, where copies go that were not asked to be elsewhere.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback],
        module: LightningModule,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        kinds = (WeightAveraging, StochasticWeightAveraging)
        self._callbacks: list[Any] = [c for c in callbacks if isinstance(c, kinds)]
        self._asked: list[tuple[WeightAveraging, Any]] = []
        self._holders: Mapping[str, frozenset[int]] = {}
        self._undo: list[Callable[[], None]] = []
        for callback in self._callbacks:
            if isinstance(callback, WeightAveraging):
                asked = averaging_device(callback)
                self._asked.append((callback, asked))
                set_averaging_device(callback, asked or _HOST)

    @property
    def copies(self) -> list[nn.Module]:
        """The copies that exist, each with the names of the module."""
        models = [(c, average_of(c)) for c in self._callbacks]
        return [
            m.module if isinstance(c, WeightAveraging) else m for c, m in models if m is not None
        ]

    def release(self, holders: Mapping[str, frozenset[int]]) -> None:
        """Lets go of what the module's placement puts elsewhere; the rest stays in step with it.

        Args:
            holders: Stages that hold each tensor of the module, by canonical name.
        """
        self._holders = holders
        here = set(self._mesh.stages)
        stages = {name: tuple(sorted(held)) for name, held in holders.items()}
        with torch.inference_mode(False):
            for copy in self.copies:
                release(copy, lambda name: bool(here & set(stages.get(name, here))), stages)
            for callback, asked in self._asked:
                average = average_of(callback)
                if asked is None and average is not None:
                    average.to(self._device)
        for callback in self._callbacks:
            if average_of(callback) is not None:
                self._narrow(callback)

    def _narrow(self, callback: Any) -> None:
        average = average_of(callback)
        modules: list[nn.Module]
        if isinstance(callback, WeightAveraging):
            modules = [self._module, average, average.module]
            walks = [
                (average, "update_parameters"),
                *((callback, name) for name in AVERAGING_WALKS),
            ]
        else:
            modules = [self._module, average]
            walks = [(callback, "update_parameters"), (callback, "transfer_weights")]
        for owner, name in walks:
            owner.__dict__[name] = _over_held(getattr(owner, name), modules)
            self._undo.append(functools.partial(owner.__dict__.pop, name, None))
        for module in {id(m): m for m in modules}.values():
            self._undo += [handle.remove for handle in _load_held(module)]

    def put_back(self) -> None:
        """Makes the copies whole again on every rank, on the host."""
        self.take_back()
        self.abandon()

    def take_back(self) -> None:
        """Makes them whole before the module is placed anew."""
        self._take_off()
        for copy in self.copies if self._holders else ():
            make_whole(copy, self._holders, self._mesh, self._device)
            copy.to(_HOST)
        self._holders = {}

    def _take_off(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def abandon(self) -> None:
        """Takes off what was put on the callbacks, without talking to other ranks."""
        self._take_off()
        for callback, asked in self._asked:
            set_averaging_device(callback, asked)
        self._asked = []


def _over_held(walk: Callable[..., Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """``walk``, for which the modules have the parameters and buffers of this rank only."""

    def held(module: nn.Module, kind: str, recurse: bool = True) -> Iterator[Tensor]:
        return (t for t in getattr(type(module), kind)(module, recurse) if not is_elsewhere(t))

    @functools.wraps(walk)
    def narrowed(*args: Any, **kwargs: Any) -> Any:
        changes = [
            (module, kind, functools.partial(held, module, kind))
            for module in modules
            for kind in ("parameters", "buffers")
        ]
        with patched(changes):
            return walk(*args, **kwargs)

    return narrowed


def _load_held(module: nn.Module) -> list[Any]:
    """Lets ``module.load_state_dict`` take this rank's part of the state of a whole module."""

    def elsewhere() -> set[str]:
        return {name for *_, name, tensor in state_items(module) if is_elsewhere(tensor)}

    def before(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in elsewhere():
            state.pop(name, None)

    def after(_: nn.Module, keys: Any) -> None:
        names = elsewhere()
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in names]

    return [
        module.register_load_state_dict_pre_hook(before),
        module.register_load_state_dict_post_hook(after),
    ]
