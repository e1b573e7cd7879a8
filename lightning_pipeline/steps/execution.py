"""How the functions of a stage are run: eagerly or compiled, once or again in the backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipeline.steps.plan import StepPlan
from lightning_pipeline.steps.recomputing import Recomputation

_serial = itertools.count()


@dataclass(frozen=True)
class Manner:
    """How a stage is run.

    Attributes:
        recomputes: Whether it keeps only what it gets until its backward.
        compile: Arguments of ``torch.compile``; ``None`` runs it eagerly.
    """

    recomputes: bool = False
    compile: dict[str, Any] | None = None


class Execution:
    """Runs the parts of calls that one stage has.

    Args:
        module: The LightningModule.
        device: The rank's device.
        manner: How.
    """

    def __init__(self, module: LightningModule, device: torch.device, manner: Manner) -> None:
        self._module, self._device, self.manner = module, device, manner
        self._compiled: WeakKeyDictionary[StepPlan, dict[int, Callable[..., Any]]]
        self._compiled = WeakKeyDictionary()
        self._again: dict[int, Recomputation] = {}

    def __call__(
        self,
        plan: StepPlan,
        call: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """``function(*args, **kwargs)``.

        Args:
            plan: The plan of the step.
            call: Index of the call that ``function`` is a part of.
            function: The same whenever this plan and call are run.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        if self.manner.compile is not None:
            made = self._compiled.setdefault(plan, {})
            if call not in made:
                made[call] = compiled(function, self.manner.compile)
            function = made[call]
        if not self.manner.recomputes:
            return function(*args, **kwargs)
        return self._recomputation(plan.module_of(call))(function, *args, **kwargs)

    def _recomputation(self, module: nn.Module) -> Recomputation:
        if id(module) not in self._again:
            self._again[id(module)] = Recomputation(module, self._module, self._device)
        return self._again[id(module)]


def compiled(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """``function`` as torch compiles it, apart from other functions of the same code.

    Compilations belong to a code object, which for ``nn.Linear.forward`` all layers share, and of
    which torch keeps only a few. Shapes are constants unless ``arguments`` say otherwise: each
    signature has a function of its own.
    """

    def own(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own.__code__ = own.__code__.replace(co_name=f"stage_{next(_serial)}")
    return torch.compile(own, **{"dynamic": False, **arguments})
