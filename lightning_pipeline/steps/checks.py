"""What a surveyed step must not do, and which of its values take a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_pipeline.boundary import leaves_of
from lightning_pipeline.errors import SplitError, StepError
from lightning_pipeline.splitting import state_items
from lightning_pipeline.splitting.frames import checkpoint_frame, checkpointed_module
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.steps.call import Call
from lightning_pipeline.steps.handmade import METHOD
from lightning_pipeline.steps.pending import TensorMeta


def no_calls(module: LightningModule, step: str, error: Exception | None) -> StepError:
    """The error for a step that never gets to a module with weights."""
    name = type(module).__name__
    if error is not None:
        return StepError(
            f"{name}.{step} raised {error!r} before it called any module that holds parameters, "
            "so there is nothing to pipeline. Make the step run on one device first: "
            "Trainer(devices=1)."
        )
    return StepError(
        f"{name}.{step} calls no module that holds parameters, so there is nothing to pipeline. "
        "A pipeline needs a step that calls its model, e.g. `self(x)` or `self.model(x)`."
    )


def with_ways_out(error: SplitError, module: LightningModule, call: str) -> SplitError:
    """``error`` with the name that its module has in ``module``, and the ways round it.

    Args:
        error: Why a called module cannot be cut.
        module: The user's LightningModule.
        call: Dotted name of the called module.
    """
    where = ".".join(name for name in (call, error.module) if name)
    sizes = {
        name: sum(parameter.numel() for parameter in child.parameters())
        for name, child in module.get_submodule(where).named_children()
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict))
    }
    ways = f"{METHOD}(num_stages) in {type(module).__name__} may make the stages by hand"
    if any(sizes.values()):
        largest = ".".join(name for name in (where, max(sizes, key=sizes.__getitem__)) if name)
        ways = (
            f"PipelineStrategy(module={largest!r}) cuts that part alone, if it is called "
            f"as one, with partition=[NAMES] where you say; and {ways}"
        )
    told = SplitError(where, error.reason, f"{error.cure}. Or leave it: {ways}", error.location)
    told.depends_on_values = error.depends_on_values
    return told


def refuse_checkpoint(name: str, module: nn.Module) -> None:
    """Refuses a checkpoint around more than one module.

    A recomputation in the backward must find all that it calls on one stage.

    Args:
        name: Dotted name of the module that is called.
        module: The module.

    Raises:
        StepError: If more than the call is in a checkpoint.
    """
    frame = checkpoint_frame()
    if frame is None:
        return
    alone = checkpointed_module(frame.f_locals.get("function")) is module
    if not alone or frame.f_locals.get("use_reentrant") is not False:
        raise StepError(
            f"The step runs self.{name} under torch.utils.checkpoint "
            + ("with use_reentrant=True" if alone else "inside another function or module")
            + ", which cannot be cut into stages. Checkpoint the modules themselves, "
            f"checkpoint(self.{name}, x, use_reentrant=False), or move the checkpoint into the "
            "forward of a module that the step calls."
        )


def refuse_packed(label: str, out: Any) -> None:
    """Refuses a call that answers with packed sequences.

    Args:
        label: The call's name.
        out: Its output.

    Raises:
        StepError: If there is one.
    """
    parts = pytree.tree_leaves(out, is_leaf=lambda part: isinstance(part, PackedSequence))
    if any(isinstance(part, PackedSequence) for part in parts):
        raise StepError(
            f"{label} returns a PackedSequence, whose number of rows depends on the lengths in the "
            "microbatch, but what stages send each other must have one shape. Put "
            "pack_padded_sequence, the module and pad_packed_sequence(..., "
            "total_length=x.shape[1]) into the forward of one module, which the step calls."
        )


def refuse_own_gradient(calls: frozenset[int]) -> None:
    """Refuses a step that differentiates through calls itself.

    Args:
        calls: Calls that what it differentiates comes from.

    Raises:
        StepError: If there are any.
    """
    if calls:
        raise StepError(
            "The step asks torch.autograd.grad for a gradient through a module that it has called, "
            "but a stage has only its own part of that graph. Move this into the forward of a "
            "module that the step calls and that returns the gradient: it then stays in one piece."
        )


def own_writes(
    module: LightningModule,
    step: str,
    calls: list[Call],
    written_in_place: set[str],
    first_uses: dict[str, int],
    before: dict[str, Tensor],
) -> frozenset[str]:
    """The buffers that a step's own code writes to on the last stage alone.

    Behind its last call only the last stage runs a step, one microbatch after the other.

    Args:
        module: The user's LightningModule, as the step has left it.
        step: Name of the step.
        calls: Its calls; what they do to their own modules is fine.
        written_in_place: Names that the step's own code wrote to.
        first_uses: Number of calls that it makes before it first uses a parameter or buffer.
        before: Parameters and buffers by name, before the step.

    Raises:
        StepError: If it writes to anything else, in place or anew.
    """
    called = tuple(f"{call.name}." for call in calls if call.name)
    rebound = {
        name
        for *_, name, tensor in state_items(module)
        if before.get(name) is not tensor and not name.startswith(called)
    }
    read = frozenset().union(*(piece for call in calls for piece in call.reads))
    fine = {
        name
        for name in written_in_place - rebound - read
        if not isinstance(before[name], nn.Parameter) and first_uses.get(name, 0) == len(calls)
    }
    if written := sorted((written_in_place | rebound) - fine):
        raise StepError(
            f"{step} itself writes to {written[0]!r} ({len(written)} tensor(s) in all). A step "
            "runs once a microbatch on every stage that it reaches, so it would do so several "
            "times, and not equally on all ranks. Do it in a hook beside the step, e.g. "
            "on_train_batch_end, or in the forward of a module that the step calls. A buffer that "
            "no module uses, such as a queue, may be written in place behind the last call of a "
            "module in the step, if the step does not use it before."
        )
    return frozenset(fine)


def drop_unused_gradients(
    calls: list[Call], arguments: list[list[Tensor]], leaves: list[list[Tensor]], returned: Any
) -> None:
    """Takes the gradient from outputs that the loss does not depend on through autograd.

    A stage that sent zeros for them would give weights a gradient of zero where one device gives
    none, and optimizers treat the two differently.

    Args:
        calls: The step's calls.
        arguments: Tensors among the arguments of each call.
        leaves: Tensors among the outputs of each call, as leaves of the step's graph.
        returned: What the step returned.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return  # an evaluation, or a step that broke off
    reached = leaves_of([loss])
    for call, given, made in reversed(list(zip(calls, arguments, leaves, strict=True))):
        needed = [id(tensor) in reached for tensor in made]
        positions = [i for i, out in enumerate(call.outputs) if isinstance(out, TensorMeta)]
        for position, tensor, need in zip(positions, made, needed, strict=True):
            if tensor.requires_grad and not need:
                call.dropped |= {position}
                call.outputs[position] = call.outputs[position]._replace(requires_grad=False)
        call.trains = any(needed)
        if call.trains:
            reached |= leaves_of(given)
