"""``lightning-pipeline plan``: the best way to run a training, before a device is rented."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning import LightningDataModule, LightningModule
from omegaconf import DictConfig

from lightning_pipeline.batch import num_rows
from lightning_pipeline.batchnorm import names_of_norms
from lightning_pipeline.hooks import arguments_after_batch
from lightning_pipeline.lightning_private import attach_data, fit_data
from lightning_pipeline.options import balance_of, recompute_of
from lightning_pipeline.order_files import write_order
from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.planning.candidates import RECOMPUTE, Bounds, Recompute
from lightning_pipeline.planning.devices import (
    THIS_MACHINE,
    Device,
    device_of,
    parse_bytes,
    product_dtype,
)
from lightning_pipeline.planning.optimizers import state_bytes
from lightning_pipeline.planning.planner import Outlook, Planner, describe
from lightning_pipeline.planning.searching import searched
from lightning_pipeline.planning.tables import (
    DECIDED,
    as_data,
    memory_table,
    overrides_of,
    plan_of,
    ranking,
    reasons,
)
from lightning_pipeline.recipes import Recipes
from lightning_pipeline.refusals import one_optimizer
from lightning_pipeline.schedules import SCHEDULES, get_schedule, is_file, require_count
from lightning_pipeline.splitting import UNPLACED, Rates, release, state_items
from lightning_pipeline.wording import plural

PLAN = "plan"
_OF_PLANNING = ("device", "memory", "top", "json", "order")
_LEAST = 1e6  # bytes; a smaller limit lacks its unit

Build = Callable[..., Any]
"""Builds what a node of the configuration describes."""


def run_plan(cfg: DictConfig, build: Build) -> None:
    """Plans what a configuration describes, and prints it.

    Args:
        cfg: The composed configuration of ``conf/plan.yaml``.
        build: Builds what a node describes.

    Raises:
        ValueError: If nothing is legal or fits; says what would.
    """
    device = device_of(cfg.device)
    bounds, limit = _bounds(cfg), _limit(cfg, device)
    blueprint, rates, bounds, notes = _blueprint(cfg, build, bounds, device)
    planner = Planner(blueprint, device, rates, limit)
    outlook = planner.search(bounds)
    if not outlook.fitting:
        raise ValueError(planner.refusal(bounds, outlook))
    if cfg.order is not None:
        outlook, note = _with_order(outlook, cfg.order)
        notes = [*notes, note]
    best = outlook.fitting[0]
    if sum(rank.total for rank in best.memory) + best.reserved <= limit:
        notes = [
            *notes,
            "The whole training fits one device: strategy=ddp needs no pipeline then, and is ahead "
            "where the links between the devices are fast.",
        ]
    plan = plan_of(best, blueprint.cut(best.candidate.num_stages), notes)
    if cfg.json:
        print(json.dumps(as_data(outlook, plan, notes, _nodes(cfg, device)), indent=2))
        return
    print(plan)
    print(memory_table(best))
    nodes = _nodes(cfg, device)
    command = [*_given(), overrides_of(best, nodes)]
    if nodes != cfg.trainer.num_nodes:
        command.append(f"trainer.num_nodes={nodes}")
    print(f"\nlightning-pipeline train {' '.join(command)}\n")
    fitting = plural(outlook.num_fitting, "layout")
    fit = "fits" if outlook.num_fitting == 1 else "fit"
    print(f"{fitting} {fit}; the best of each kind, the fastest first:")
    print(ranking(outlook, cfg.top))
    for line in reasons(outlook):
        print(f"- {line}")


def _with_order(outlook: Outlook, path: str) -> tuple[Outlook, str]:
    """Puts an order of its own first and into a file, if it beats the schedules; with a note."""
    known = outlook.fitting[0]
    found = searched(outlook, path)
    if found is None:
        return outlook, (
            f"No order was found that is faster than {known.candidate.schedule.name} by 1 %: "
            f"{path} is not written."
        )
    try:
        write_order(found.lists, path)
    except OSError as error:
        raise ValueError(
            f"The order's file must be writable, got {error}. The name comes from order={path}. "
            "Set it to a file in a folder that can be written to."
        ) from None
    gain = 100 * (1 - found.seconds_per_sample / known.seconds_per_sample)
    note = (
        f"The order in {path} takes {gain:.1f} % less time for a sample than the best schedule, "
        f"{describe(known.candidate)}."
    )
    fitting = (found, *outlook.fitting)
    return replace(outlook, fitting=fitting, num_fitting=outlook.num_fitting + 1), note


def _given() -> list[str]:
    """The user's own words, but for what is decided here and what only planning knows."""
    hydra = HydraConfig.get()
    sources = [s for s in hydra.runtime.config_sources if s.provider == "command-line"]
    words = [f"--config-dir={source.path}" for source in sources]
    for word in hydra.overrides.task:
        key = word.partition("=")[0].lstrip("+~").partition(".")[0]
        if key not in (*DECIDED, *_OF_PLANNING):
            words.append(shlex.quote(word))
    return words


def _bounds(cfg: DictConfig) -> Bounds:
    """What the configuration leaves open; the rows are filled in when the batch is known."""
    if not isinstance(cfg.strategy, DictConfig) or "pipeline_parallel_size" not in cfg.strategy:
        raise ValueError(
            f"A plan is one of a pipeline, got strategy={cfg.strategy}. The value comes from the "
            "configuration. Leave it out, or set strategy=pipeline."
        )
    devices = cfg.devices * cfg.trainer.num_nodes if isinstance(cfg.devices, int) else cfg.devices
    require_count("devices", devices)
    if devices < 2:
        raise ValueError(
            f"A pipeline needs at least 2 devices, got {devices}. The number comes from "
            f"devices={cfg.devices}. Set devices=2 or more."
        )
    named = cfg.schedule.name != "auto"
    _check_order(cfg.order, cfg.schedule.name)
    asked = cfg.activation_checkpointing
    require_count("top", cfg.top)
    bounds = Bounds(
        devices,
        rows=1,
        schedules=[get_schedule(cfg.schedule.name)] if named else SCHEDULES,
        stages=cfg.stages,
        stages_per_rank=cfg.schedule.stages_per_rank,
        microbatches=cfg.microbatches,
        recompute=RECOMPUTE if asked == "auto" else [_recompute(asked)],
    )
    bounds.check()
    return bounds


def _recompute(asked: Any) -> Recompute:
    if not isinstance(asked, str):
        raise ValueError(
            f"A plan recomputes stages, got activation_checkpointing={asked}. Set none, full, "
            "except_last or auto."
        )
    chosen = recompute_of(asked)  # type: ignore[arg-type]
    assert isinstance(chosen, str)
    return chosen


def _nodes(cfg: DictConfig, device: Device) -> int:
    """Nodes for the devices: as many as it takes where the configuration has one."""
    nodes: int = cfg.trainer.num_nodes
    if nodes == 1 and cfg.devices % device.devices_per_node == 0:
        return max(1, cfg.devices // device.devices_per_node)
    return nodes


def _check_order(order: str | None, schedule: str) -> None:
    if order is not None and (schedule != "auto" or not is_file(order) or "," in order):
        raise ValueError(
            "order must be the name of a .csv file, without commas, for an order that is searched "
            f"beside all schedules, got order={order} with schedule={schedule}. Set "
            "order=order.csv schedule=auto."
        )


def _limit(cfg: DictConfig, device: Device) -> float:
    """Bytes of one device; the memory of a host is shared by the ranks on it."""
    if cfg.memory is not None:
        limit = parse_bytes("memory", cfg.memory)
        if limit < _LEAST:
            raise ValueError(
                f"memory must be at least a megabyte, got {cfg.memory} bytes. The value comes from "
                f"memory={cfg.memory}. Set it with a unit, e.g. memory={cfg.memory}GB."
            )
        return limit
    return device.memory / (cfg.devices if device.kind == "cpu" else 1)


def _blueprint(
    cfg: DictConfig, build: Build, bounds: Bounds, device: Device
) -> tuple[Blueprint, Rates, Bounds, list[str]]:
    """Records the configured model on the shapes of the first batch, without its weights."""
    recipes = Recipes()
    with recipes.watch(), _without_talk():
        module = build(cfg.model)
        trainer = _trainer(cfg, module, build(cfg.data))
        module.configure_model()
    trainer.precision_plugin.convert_module(module)
    with one_optimizer(module):
        trainer.strategy.setup_optimizers(trainer)
    sizes, notes = state_bytes(trainer.strategy.optimizers)
    context = trainer.precision_plugin.train_step_context
    batch = _first_batch(trainer, module)
    rows = num_rows(batch, "training_step")
    min_rows = 2 if names_of_norms(module) else 1
    bounds = replace(bounds, rows=rows, min_rows=min(min_rows, rows))
    counts = [m for ranks in bounds.pipelines() for m in bounds.counts(ranks)]
    unplaced = {item.name: UNPLACED for item in state_items(module) if item.tensor.is_meta}
    by_name = {item.name: sizes.get(id(item.tensor), 0) for item in state_items(module)}
    release(module, lambda name: name not in unplaced, unplaced)
    blueprint = Blueprint(
        module,
        batch,
        rows,
        (min(counts), max(counts)),
        bounds.most_stages,
        device.cutting_rates,
        by_name,
        rest=arguments_after_batch(module, "training_step"),
        context=context,
        measured_on=_measured_on(cfg, device),
    )
    rates = device.rates(product_dtype(module, torch.device("cpu"), context))
    return blueprint, rates, bounds, notes


def _measured_on(cfg: DictConfig, device: Device) -> torch.device | None:
    """Where the pieces are run, if their times are to be measured."""
    if balance_of(cfg.strategy.balance_by) == "cost":
        return None
    if device.name != THIS_MACHINE:
        raise ValueError(
            f"Times are measured on this machine, got device={device.name} with "
            "strategy.balance_by=time. Set device=this_machine or strategy.balance_by=cost."
        )
    return torch.device("cpu")


def _trainer(cfg: DictConfig, module: LightningModule, data: Any) -> L.Trainer:
    """A Trainer that trains nothing: it gives hooks what they ask for."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision=cfg.trainer.precision,
        max_epochs=cfg.trainer.max_epochs,
        max_steps=cfg.trainer.max_steps,
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        limit_train_batches=cfg.trainer.limit_train_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.connect(module)
    is_data = isinstance(data, LightningDataModule)
    given = {"datamodule": data} if is_data else {"train_dataloaders": data}
    attach_data(trainer, module, **given)
    if is_data:
        data.setup("fit")
    module.setup("fit")
    return trainer


@contextmanager
def _without_talk() -> Iterator[None]:
    """Lets Lightning say nothing of the devices of this machine, which are not meant."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_batch(trainer: L.Trainer, module: LightningModule) -> Any:
    loader = fit_data(trainer)
    batch = trainer.precision_plugin.convert_input(next(iter(loader)))
    return trainer.strategy.batch_to_device(batch)
