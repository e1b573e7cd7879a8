"""``schedule="auto"``: what the first batch of a run decides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule

from lightning_pipeline.batch import num_rows
from lightning_pipeline.batchnorm import names_of_norms
from lightning_pipeline.errors import PipelineError, StepError
from lightning_pipeline.hooks import arguments_after_batch
from lightning_pipeline.mesh import Mesh, Scope
from lightning_pipeline.options import Options
from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.planning.candidates import Bounds
from lightning_pipeline.planning.devices import local_device, product_dtype
from lightning_pipeline.planning.optimizers import state_bytes
from lightning_pipeline.planning.planner import Planner, describe, seconds_or_ms
from lightning_pipeline.planning.searching import searched
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.splitting import state_items


def choose(
    module: LightningModule,
    batch: Any,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
) -> Options:
    """The options with the schedule, stages and microbatches that are predicted to be fastest.

    The ranks of a pipeline and the replicas are those of the mesh, for each replica has drawn its
    batch by then. Every rank takes what global rank 0 has found.

    Args:
        module: The user's LightningModule, not placed yet.
        batch: The first batch.
        options: What the user has asked for.
        mesh: The rank's place, groups built.
        device: The rank's device.
        context: The precision plugin's context of the training step.

    Raises:
        StepError: On every rank, if nothing fits the device, or the training step cannot be
            followed without values; says what would do.
    """
    box: list[Any] = [None]
    cause: Exception | None = None
    if mesh.global_rank == 0:
        try:
            with mesh.within(Scope.ALONE):
                box = [_choice(module, batch, options, mesh, device, context)]
        except Exception as error:  # the other ranks wait for an answer
            known = isinstance(error, (PipelineError, ValueError))
            box, cause = [str(error) if known else f"{type(error).__name__}: {error}"], error
    dist.broadcast_object_list(box, 0, device=device)
    if isinstance(box[0], str):
        raise StepError(
            f"schedule='auto' chooses by the first batch of the fit, and cannot: {box[0]} Name a "
            "schedule, e.g. schedule='1F1B'; if the batch is one of a validation that "
            "training_step does not take, set Trainer(num_sanity_val_steps=0)."
        ) from cause
    schedule, depth, microbatches, note = box[0]
    return replace(
        options,
        schedule=schedule,
        stages_per_rank=depth,
        num_microbatches=microbatches,
        open=None,
        notes=(*options.notes, note),
    )


def _choice(
    module: LightningModule,
    batch: Any,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[Schedule, int, int, str]:
    """Schedule, stages on each rank, microbatches and a note.

    Raises:
        ValueError: If nothing is legal or fits; says what would.
        PipelineError: If the training step cannot be followed without values.
    """
    assert options.open is not None
    partition = options.partition
    rows = num_rows(batch, "training_step")
    again = options.activation_checkpointing
    bounds = Bounds(
        mesh.sizes.pipeline * mesh.sizes.data,
        rows,
        min(rows, 2 if names_of_norms(module) else 1),
        ranks=mesh.sizes.pipeline,
        stages="auto" if isinstance(partition, str) else len(partition) + 1,
        stages_per_rank=options.open.stages_per_rank,
        microbatches=options.open.num_microbatches,
        recompute=[again if isinstance(again, str) else "none"],
    )
    bounds.check()
    counts, here = bounds.counts(mesh.sizes.pipeline), local_device(device)
    sizes, _ = state_bytes(module.trainer.strategy.optimizers)
    blueprint = Blueprint(
        module,
        move_data_to_device(batch, "cpu"),
        rows,
        (min(counts), max(counts)),
        bounds.most_stages,
        here.cutting_rates,
        {item.name: sizes.get(id(item.tensor), 0) for item in state_items(module)},
        rest=arguments_after_batch(module, "training_step"),
        context=context,
        partition=partition,
        only=options.module,
        uncut=options.uncut,
        measured_on=device if options.balance_by == "time" else None,
    )
    rates = here.rates(product_dtype(module, device, context))
    planner = Planner(blueprint, here, rates, here.memory)
    outlook = planner.search(bounds)
    if not outlook.fitting:
        raise ValueError(planner.refusal(bounds, outlook))
    best = searched(outlook) or outlook.fitting[0]
    found = best.candidate
    note = (
        f"schedule='auto' has chosen {describe(found)}: predicted to be the fastest of the "
        f"ways that fit ({outlook.num_fitting})"
        f"{' and the orders searched for them' if best not in outlook.fitting else ''}, "
        f"{seconds_or_ms(best.seconds)} of computing and messages a step on {here.name}"
    )
    return found.schedule, found.stages_per_rank, found.microbatches, note
