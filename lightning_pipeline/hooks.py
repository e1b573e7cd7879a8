"""What Lightning passes to the user's hooks, and which of them look at what."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_pipeline.lightning_private import is_compiled


def arguments_after_batch(module: LightningModule, step: str) -> tuple[Any, ...]:
    """What Lightning passes to ``step`` behind its first batch."""
    numbered = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
    return (0,) if numbered else ()


def without_compilation(module: LightningModule) -> None:
    """Takes back what ``torch.compile(LightningModule)`` made of its steps, which are never whole.

    Compiled blocks inside it stay compiled.
    """
    if not is_compiled(module):
        return
    to_uncompiled(module)
    rank_zero_warn(
        f"{type(module).__name__} was given to the Trainer as torch.compile(module). "
        "strategy='pipeline' runs its steps in parts, which are not compiled, so it runs as if it "
        "were not compiled. Compile the blocks of the model instead: `block.compile()` for each."
    )


def seeds_workers() -> bool:
    """Whether the user called ``seed_everything(workers=True)``."""
    return bool(int(os.environ.get("PL_SEED_WORKERS", "0")))


def sees_each_backward(module: LightningModule) -> bool:
    """Whether a hook looks at the gradients after every backward, also of accumulated batches.

    The library's own callbacks look at the clock there.
    """
    seers = (module, *module.trainer.callbacks)  # type: ignore[attr-defined]
    return any(
        is_overridden("on_after_backward", seer) and not _is_ours(seer.on_after_backward)
        for seer in seers
    )


def _is_ours(hook: Callable[..., Any]) -> bool:
    return hook.__module__.partition(".")[0] == __name__.partition(".")[0]


def sees_old_gradients(module: LightningModule) -> bool:
    """Whether a hook between the step and the backward looks at the last step's gradients."""
    hooks = ("optimizer_zero_grad", "on_before_zero_grad")
    if any(is_overridden(hook, module) for hook in hooks):
        return True
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden("on_before_zero_grad", callback) for callback in callbacks)
