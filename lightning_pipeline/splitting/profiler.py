"""Measuring what each submodule of a forward costs, to decide which ones to open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting.cost import CostMode, Profile
from lightning_pipeline.splitting.frames import (
    checkpoint_arguments,
    checkpointed_module,
    error_location,
)
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.torch_private import VALUE_DEPENDENT
from lightning_pipeline.splitting.trial import SHAPE_CURE, TrialError, trial_run


class Profiler:
    """Runs a forward on stand-ins and sums the cost of every submodule.

    Submodules that cannot run on stand-ins, or whose checkpointed part is not a submodule of
    theirs, are noted as whole.
    """

    def __init__(self, sandbox: Sandbox, cost: CostMode) -> None:
        self.sandbox, self.cost = sandbox, cost
        self.profile = Profile()
        self.stack: list[str] = []
        self.quiet = False

    def record(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run ``forward`` as the outermost module's own code."""
        self.stack.append("")
        try:
            out = forward(*args, **kwargs)
        except SplitError:
            raise
        except Exception as error:
            raise self._root_error(error) from error
        self.profile.add("", self.cost.work)
        return out

    def on_call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """Count one call of a submodule."""
        name = self.sandbox.names.get(id(module))
        if name is None or self.quiet or self.stack[-1] == name:
            return original(module, *args, **kwargs)
        self._note_checkpoint(module)
        before = self.cost.work
        self.stack.append(name)
        try:
            return original(module, *args, **kwargs)
        except SplitError:
            raise
        except Exception as error:
            self.profile.whole[name] = f"{type(error).__name__}: {error}"
            return self._trial(original, module, args, kwargs, error)
        finally:
            self.stack.pop()
            self.profile.add(name, self.cost.work - before)

    def on_function(
        self, original: Callable[..., Any], function: type, args: tuple, kwargs: dict
    ) -> Any:
        """Custom autograd functions need no attention here."""
        return original(*args, **kwargs)

    def on_read(self, original: Callable[..., Any], module: nn.Module, name: str) -> Any:
        """Nor do reads."""
        return original(module, name)

    def on_read_trainer(self, original: Callable[..., Any], trainer: Any, name: str) -> Any:
        """Nor these."""
        return original(trainer, name)

    def on_assign(self, module: nn.Module, attribute: str, value: object) -> None:
        """Nor do assignments."""

    def _note_checkpoint(self, module: nn.Module) -> None:
        """A checkpointed region that begins inside a module keeps that module whole."""
        if not self.stack[-1]:
            return
        found = checkpoint_arguments(Profiler.record.__code__)
        if found is None:
            return
        owner = checkpointed_module(found["function"])
        if owner is not module:
            name = self.sandbox.names.get(id(owner)) or self.stack[-1]
            self.profile.whole.setdefault(name, "activation checkpointing")

    def _trial(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        cause: Exception,
    ) -> Any:
        self.quiet = True
        try:
            return trial_run(self.sandbox, self.cost, original, module, args, kwargs)
        except Exception as error:
            raise cause from error
        finally:
            self.quiet = False

    def _root_error(self, error: Exception) -> SplitError:
        cure = "Move this code into a submodule of its own, which then stays whole"
        if isinstance(error.__cause__, TrialError):
            reason = f"it needs a submodule of which {error.__cause__}"
            cure = SHAPE_CURE
        elif isinstance(error, VALUE_DEPENDENT):
            reason = f"its forward depends on the values of tensors ({error})"
        else:
            reason = f"it raised {type(error).__name__}: {error}"
        refused = SplitError("", reason, cure, error_location(error))
        refused.depends_on_values = isinstance(error, VALUE_DEPENDENT)
        return refused
