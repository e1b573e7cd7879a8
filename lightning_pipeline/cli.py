"""The command line: one word says what to do, Hydra overrides say with what.

Lightning starts the other ranks by running the command line again, which a sweep or a time of day
in a directory's name would resolve anew. So each job's resolved configuration is written beside
its results as `job.yaml`, and the other ranks are started from that file without Hydra.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import hydra
import lightning as L
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_pipeline.bench.ranks import RankFailed
from lightning_pipeline.errors import PipelineError
from lightning_pipeline.layout import Layout, resolve_layout
from lightning_pipeline.overrides import for_target, for_training
from lightning_pipeline.planning.command import PLAN, run_plan
from lightning_pipeline.sharded import consolidate

CONF = "pkg://lightning_pipeline.conf"
JOB_FILE = "job.yaml"
HELP = """\
lightning-pipeline COMMAND [OVERRIDE ...] [--multirun] [--cfg job] [--help]

  train     train; checkpoint=PATH goes on from there
  validate  compute the validation metrics of checkpoint=PATH
  test      compute the test metrics of checkpoint=PATH
  predict   write the predictions of checkpoint=PATH for the test data
  plan      predict the best schedule, layout and memory of a training on device=NAME
  consolidate FOLDER [FILE]
            turn a checkpoint folder into one plain Lightning file
  bench     measure what bench=limit, hand, ... is about, and write a table
  draw      draw a step under schedule=NAME, [NAME, ...] or all: format=text, svg, png or html

Examples:
  lightning-pipeline train
  lightning-pipeline train schedule=interleaved_zero_bubble devices=2 stages=4
  lightning-pipeline train schedule=orders.csv
  lightning-pipeline train --multirun schedule=gpipe,1f1b,interleaved_1f1b
  lightning-pipeline train strategy=ddp
  lightning-pipeline plan experiment=gpt device=h100 devices=8 memory=80GB order=order.csv
  lightning-pipeline test checkpoint=outputs/DAY/TIME/checkpoints/last.ckpt
  lightning-pipeline bench bench=limit ranks=[2] microbatches=[8]
  lightning-pipeline draw schedule=[1f1b,zbv_zero_bubble] ranks=4 microbatches=8 backward_weight=0.8
  lightning-pipeline draw output=schedules.html

A folder is what strategy.save_distributed_checkpoint=true writes.
Overrides are Hydra's; `lightning-pipeline train --help` lists the groups and the configuration,
`lightning-pipeline bench bench=NAME --help` those of a benchmark, `draw --help` those of a picture.
"""

CONSOLIDATE, BENCH, DRAW = "consolidate", "bench", "draw"
Metrics = dict[str, float]

_SHOWS_CONFIG = ContextVar("shows_config", default=False)
"""Whether Hydra only prints the configuration."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after the program's name; `None` takes them from `sys.argv`.

    Returns:
        The exit code: 0 if all went well, 2 if there is no such command.

    Raises:
        SystemExit: With code 2 if the configuration is refused, 1 if a run fails.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("help", "-h", "--help"):
        print(HELP)
        return 0
    command, *overrides = words
    _SHOWS_CONFIG.set(any(word in ("-c", "--cfg") or word[:6] == "--cfg=" for word in words))
    if command == CONSOLIDATE:
        return _consolidate(overrides)
    if command in (BENCH, DRAW):
        with _arguments([for_target(word) for word in overrides]):
            _run_target(command)
        return 0
    if command not in COMMANDS and command != PLAN:
        known = ", ".join([*COMMANDS, PLAN, CONSOLIDATE, BENCH, DRAW])
        print(f"The command must be one of {known}, got {command!r}.\n\n{HELP}", file=sys.stderr)
        return 2
    if overrides[:1] == ["--job"]:
        # A rank that Lightning started: what follows the path are overrides that Lightning adds
        # for Hydra, and there is nothing left to override.
        run(command, _load(Path(overrides[1])))
        return 0
    try:
        overrides = [for_training(word) for word in overrides]
    except ValueError as error:
        refuse(error)
    # Hydra's parser takes no override after a flag that stands among them.
    overrides.sort(key=lambda word: word not in ("-m", "--multirun"))
    with _arguments(overrides):
        _plan() if command == PLAN else _hydra_main(command)
    return 0


def _consolidate(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        f"lightning-pipeline {CONSOLIDATE}",
        description="Turns a checkpoint folder, which strategy.save_distributed_checkpoint=true "
        "writes, into one plain Lightning file.",
    )
    parser.add_argument("--trusted", action="store_true", help="take objects that can run code")
    parser.add_argument("folder", metavar="FOLDER", help="the checkpoint folder")
    told = "the file to write; FOLDER.consolidated if left out"
    parser.add_argument("file", metavar="FILE", nargs="?", help=told)
    given = parser.parse_args(words)
    try:
        file = consolidate(given.folder, given.file, False if given.trusted else None)
    except UnpicklingError as error:
        refuse(ValueError(f"{error}\nIf you trust its source, add --trusted."))
    except (OSError, ValueError, PipelineError) as error:
        refuse(error)
    print(f"checkpoint: {file}")
    return 0


def _run_target(name: str) -> None:
    """Calls the function that a configuration is the arguments of, and writes what it reports."""

    @hydra.main(version_base="1.3", config_path=CONF, config_name=name)
    def job(cfg: DictConfig) -> None:
        output = Path(HydraConfig.get().runtime.output_dir)
        try:
            report = _build(cfg)
        except InstantiationException as error:
            if isinstance(error.__cause__, ValueError | ModuleNotFoundError):
                refuse(error.__cause__)
            if isinstance(error.__cause__, RankFailed):
                print(error.__cause__, file=sys.stderr)
                raise SystemExit(1) from None
            raise
        if report is not None:
            report.write(output)
            print(f"results: {os.path.relpath(output)}")

    job()


def _plan() -> None:
    @hydra.main(version_base="1.3", config_path=CONF, config_name="plan")
    def job(cfg: DictConfig) -> None:
        try:
            run_plan(cfg, _build)
        except (ValueError, PipelineError) as error:
            refuse(error)

    job()


def _hydra_main(command: str) -> None:
    @hydra.main(version_base="1.3", config_path=CONF, config_name="train")
    def job(cfg: DictConfig) -> Metrics:
        output = Path(HydraConfig.get().runtime.output_dir)
        try:
            settled = settle(command, cfg)
        except ValueError as error:
            refuse(error)
        _save(settled, output / JOB_FILE)
        with _arguments([command, "--job", str(output / JOB_FILE)]), _environment():
            return run(command, settled)

    job()


def layout_of(cfg: DictConfig) -> Layout:
    """Returns how the configured model lies on the configured devices.

    Args:
        cfg: The composed configuration.

    Raises:
        ValueError: If devices, stages, schedule and microbatches do not fit together.
    """
    nodes = cfg.trainer.num_nodes
    devices = cfg.devices * nodes if isinstance(cfg.devices, int) else cfg.devices
    return resolve_layout(
        devices, cfg.stages, cfg.schedule.name, cfg.microbatches, cfg.schedule.stages_per_rank
    )


def _resolve_layout(name: str, *, _root_: DictConfig) -> Any:
    try:
        return getattr(layout_of(_root_), name)
    except ValueError as error:
        if _SHOWS_CONFIG.get():
            # Hydra would print a trace of this error, and another one of the interpolation.
            refuse(error)
        raise


# Lets files say ${layout:ranks}, so that `--cfg job --resolve` shows the numbers that a run uses.
OmegaConf.register_new_resolver("layout", _resolve_layout, replace=True)


def settle(command: str, cfg: DictConfig) -> DictConfig:
    """Returns the configuration with every interpolation resolved, after checking it.

    Args:
        command: What will be done with it.
        cfg: The composed configuration.

    Raises:
        ValueError: If it can't work; nothing has been started by then.
    """
    if isinstance(cfg.strategy, DictConfig) and "pipeline_parallel_size" in cfg.strategy:
        layout_of(cfg)
    if command != "train" and cfg.checkpoint is None:
        raise ValueError(
            f"{command} needs a checkpoint, got checkpoint=null. The value comes from the "
            "configuration. Set checkpoint=PATH to a file that `lightning-pipeline train` wrote."
        )
    if cfg.checkpoint is not None and not Path(cfg.checkpoint).exists():
        raise ValueError(
            f"The checkpoint must exist, and {str(cfg.checkpoint)!r} does not in {os.getcwd()}. "
            f"The path comes from checkpoint={cfg.checkpoint}. Set it to a path that exists."
        )
    settled = copy.deepcopy(cfg)
    OmegaConf.resolve(settled)
    return settled


def run(command: str, cfg: DictConfig) -> Metrics:
    """Builds everything that a settled configuration names, and does what the command says.

    Args:
        command: One of `COMMANDS`.
        cfg: What `settle` returned.

    Returns:
        The metrics that the trainer holds at the end.

    Raises:
        SystemExit: With code 2 if the strategy refuses its arguments, 1 if the run fails.
    """
    L.seed_everything(cfg.seed, workers=True)
    trainer = build_trainer(cfg)
    model, data = _build(cfg.model), _build(cfg.data)
    try:
        COMMANDS[command](trainer, model, data, cfg)
    except Exception:
        # Not left to Hydra: a sweep would go on with its next job, while Lightning's watch over
        # the other ranks ends this process because they are gone.
        sys.excepthook(*sys.exc_info())  # once, if it was not said yet
        _end_ranks(trainer, kill=True)
        raise SystemExit(1) from None
    _end_ranks(trainer)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """Builds the trainer with its strategy, callbacks and logger.

    Args:
        cfg: What `settle` returned.

    Raises:
        SystemExit: With code 2 if the strategy refuses its arguments.
    """
    try:
        strategy = _build(cfg.strategy)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError | TypeError):
            refuse(error.__cause__)
        raise
    callbacks = [_build(node) for node in (cfg.callbacks or {}).values()]
    logger = _build(cfg.logger)
    return _build(cfg.trainer, strategy=strategy, callbacks=callbacks, logger=logger)


def _build(node: Any, **arguments: Any) -> Any:
    """Builds what a node describes; what is no node, such as "ddp" or `false`, is passed on."""
    if not isinstance(node, DictConfig):
        return node
    # Lists of Hydra's own in a model's hyperparameters would make its checkpoints unsafe to load.
    return instantiate(node, **arguments, _convert_="all")


def refuse(error: Exception) -> NoReturn:
    """Ends the program with code 2 and the error's text, which holds the cure, without a trace."""
    print(f"lightning-pipeline: {error}", file=sys.stderr)
    raise SystemExit(2)


def _train(trainer: L.Trainer, model: Any, data: Any, cfg: DictConfig) -> None:
    trainer.fit(model, data, ckpt_path=cfg.checkpoint)
    if not trainer.is_global_zero:
        return
    if "val_acc" in trainer.callback_metrics:
        print(f"final validation accuracy: {trainer.callback_metrics['val_acc']:.4f}")
    for name, value in trainer.callback_metrics.items():
        if name.startswith("val_") and name != "val_acc":
            print(f"final {name}: {value:.4f}")
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best:
        print(f"checkpoint: {os.path.relpath(best)}")


def _validate(trainer: L.Trainer, model: Any, data: Any, cfg: DictConfig) -> None:
    trainer.validate(model, data, ckpt_path=cfg.checkpoint)


def _test(trainer: L.Trainer, model: Any, data: Any, cfg: DictConfig) -> None:
    trainer.test(model, data, ckpt_path=cfg.checkpoint)


def _predict(trainer: L.Trainer, model: Any, data: Any, cfg: DictConfig) -> None:
    batches = trainer.predict(model, data, ckpt_path=cfg.checkpoint) or []
    mesh = getattr(trainer.strategy, "mesh", None)
    if mesh is not None and not mesh.is_last:
        return  # all ranks of a pipeline have the same predictions
    part = trainer.global_rank if mesh is None else mesh.data_rank
    path = Path(cfg.output_dir) / f"predictions_{part}.pt"
    torch.save(batches, path)
    print(f"predictions: {os.path.relpath(path)}")


COMMANDS: dict[str, Callable[[L.Trainer, Any, Any, DictConfig], None]] = {
    "train": _train,
    "validate": _validate,
    "test": _test,
    "predict": _predict,
}


@rank_zero_only
def _save(cfg: DictConfig, path: Path) -> None:
    OmegaConf.save(cfg, path)


def _load(path: Path) -> DictConfig:
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig), path
    return cfg


def _end_ranks(trainer: L.Trainer, kill: bool = False) -> None:
    """Leaves nothing of a job behind: its process group ends, then the ranks that it started.

    Args:
        trainer: The job's trainer.
        kill: Whether the other ranks may wait for this one in vain, because it failed.
    """
    children = [
        process
        for process in getattr(trainer.strategy.launcher, "procs", [])
        if isinstance(process, subprocess.Popen)
    ]
    if kill:
        for child in children:
            child.kill()
    if dist.is_initialized():
        dist.destroy_process_group()
    for child in children:
        child.wait()


@contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    """Replaces the words after the program's name, which Hydra and Lightning's launcher read."""
    saved = sys.argv
    sys.argv = [saved[0], *words]
    try:
        yield
    finally:
        sys.argv = saved


@contextmanager
def _environment() -> Iterator[None]:
    """Takes back what a job sets, such as LOCAL_RANK, which tells the next that it is not first."""
    saved = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
