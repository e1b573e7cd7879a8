"""Stages that the user makes by hand, for a model whose forward cannot be recorded.

The call of one module is replaced by the calls of its stages, one after the other. To the rest of
the library these are several calls of one step, of which none is looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pipeline.errors import StepError
from lightning_pipeline.splitting import state_items

METHOD = "configure_stages"
"""Name of the method of a LightningModule that makes them: ``(num_stages) -> list[nn.Module]``."""


@dataclass(frozen=True)
class HandMade:
    """A module's call as a chain of stages.

    Attributes:
        module: The LightningModule.
        replaced: Dotted name of the module whose call they make up; ``""`` is the LightningModule's
            own forward.
        stages: One module a stage. Each gets what the one before returns, a tuple as several
            arguments; the first gets the arguments of the call.
        foreign: Modules in them that the LightningModule does not know.
    """

    module: LightningModule
    replaced: str
    stages: tuple[nn.Module, ...]
    foreign: tuple[nn.Module, ...]

    @classmethod
    def of(cls, module: LightningModule, replaced: str | None, num_stages: int) -> HandMade | None:
        """Asks the LightningModule for its stages; ``None`` if it does not define any.

        Raises:
            MisconfigurationException: If they are not one module a stage, made of the
                LightningModule's own weights.
        """
        configure: Callable[[int], Sequence[nn.Module]] | None = getattr(module, METHOD, None)
        if configure is None:
            return None
        stages = configure(num_stages)
        where = f"{type(module).__name__}.{METHOD}({num_stages})"
        listed = isinstance(stages, (list, tuple, nn.ModuleList, nn.Sequential))
        if not listed or not all(isinstance(stage, nn.Module) for stage in stages):
            raise MisconfigurationException(
                f"{where} must return a list of modules, one for each stage, got {stages!r}. "
                "Return e.g. [nn.Sequential(*self.blocks[:2]), nn.Sequential(*self.blocks[2:])]."
            )
        if len(stages) != num_stages:
            raise MisconfigurationException(
                f"{where} must return {num_stages} modules, one for each stage, got {len(stages)}. "
                "The number comes from the ranks of a pipeline times the stages on each; divide "
                "by the argument num_stages, or pass on what a stage gets with nn.Identity()."
            )
        _check_state(module, stages, where)
        known = set(module.modules())
        foreign = {child for stage in stages for child in stage.modules()} - known
        return cls(module, replaced or "", tuple(stages), tuple(foreign))

    @property
    def names(self) -> list[str]:
        """What the stages are called in plans and messages."""
        return [f"{METHOD}[{index}]" for index in range(len(self.stages))]

    def targets(self, others: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
        """The modules whose calls a step is cut at.

        Args:
            others: Those of a LightningModule without stages by hand.
        """
        own = list(zip(self.names, self.stages, strict=True))
        made = {id(stage) for stage in self.stages}
        return own + [
            (name, child)
            for name, child in others
            if name != self.replaced and id(child) not in made
        ]

    def changes(self) -> list[tuple[object, str, Any]]:
        """The patch under which the replaced module calls the stages."""
        return [(self.module.get_submodule(self.replaced), "forward", self._chain)]

    def _chain(self, *args: Any, **kwargs: Any) -> Any:
        training = self.module.get_submodule(self.replaced).training
        for child in self.foreign:  # train() and eval() do not reach them
            child.training = training
        out: Any = args
        for index, stage in enumerate(self.stages):
            given = out if isinstance(out, tuple) else (out,)
            out = stage(*given, **kwargs) if index == 0 else stage(*given)
        return out


def is_by_hand(name: str) -> bool:
    """Whether ``name`` is that of a stage made by hand."""
    return name.startswith(f"{METHOD}[")


def check(stages: HandMade, partition: object, calls: Sequence[str]) -> None:
    """Refuses stages that the step never gets to, and a second way to cut.

    Args:
        stages: The stages.
        partition: The strategy's argument.
        calls: Names of the modules that the step calls.

    Raises:
        MisconfigurationException: If a partition is asked for as well.
        StepError: If the step calls another module than the one that they stand for.
    """
    model = type(stages.module).__name__
    if partition != "auto":
        raise MisconfigurationException(
            f"{model}.{METHOD} and PipelineStrategy(partition={partition!r}) both say where to "
            f"cut. Remove {METHOD}, or set partition='auto'."
        )
    if not any(map(is_by_hand, calls)):
        called = ", ".join(f"self.{name}" if name else "self" for name in dict.fromkeys(calls))
        replaced = f"self.{stages.replaced}" if stages.replaced else "self"
        raise StepError(
            f"The stages of {model}.{METHOD} stand for the call of {replaced}, but the step calls "
            f"{called}. Call self(batch) in the step, or name the module that they make up: "
            "PipelineStrategy(module=NAME)."
        )


def _check_state(module: LightningModule, stages: Sequence[nn.Module], where: str) -> None:
    owners = set(module.modules())
    known = {id(parameter) for parameter in module.parameters()}
    for index, stage in enumerate(stages):
        for owner, entries, _, name, tensor in state_items(stage):
            if owner in owners or (entries is owner._parameters and id(tensor) in known):
                continue
            raise MisconfigurationException(
                f"{where} must be made of the model's own modules, but {name!r} of stage {index} "
                f"({type(owner).__name__}) is not in {type(module).__name__}: it would not be "
                "trained or saved. Make the module in __init__ and keep it as an attribute."
            )
