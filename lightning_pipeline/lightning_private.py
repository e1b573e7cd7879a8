"""The private names of Lightning and torchmetrics that are needed, in one place.

Tested with Lightning 2.6 and torchmetrics 1.4 to 1.9. ``NAMES`` has all of them, and a test looks
for each; ``IN_PLACE`` are those that other files read where they stand, in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.exceptions import _TunerExitException

__all__ = [
    "AVERAGING_WALKS",
    "IN_PLACE",
    "LOGGERS",
    "MODULE_DEVICE",
    "NAMES",
    "TRAINER",
    "MultiProcessingLauncher",
    "PrefetchDataFetcher",
    "SubprocessScriptLauncher",
    "TunerExitException",
    "WrappingCheckpointIO",
    "attach_data",
    "average_of",
    "averaging_device",
    "combined_loader",
    "deals_out_data",
    "fit_data",
    "forget_children",
    "handle_evaluation",
    "handle_fetcher",
    "in_thread_of",
    "is_compiled",
    "keeps_link_to_last",
    "last_saved",
    "logged_results",
    "optimizers_to_device",
    "replace_check_for_sigterm",
    "replace_check_for_validation",
    "replace_evaluation_steps",
    "replace_link",
    "replace_requeue_handler",
    "replace_sigterm_notifier",
    "replace_transfer",
    "set_averaging_device",
    "set_device",
    "throughputs",
    "trainer_of",
    "validates_by_time",
]

IN_PLACE: dict[str, tuple[str, ...]] = {
    "lightning.pytorch.loops._TrainingEpochLoop": ("_should_accumulate",),
    "torchmetrics.Metric": (
        *("_computed", "_copy_state_dict", "_filter_kwargs", "_forward_cache"),
        *("_should_unsync", "_to_sync"),
    ),
    "lightning.pytorch.strategies.DDPStrategy": (
        *("_configure_launcher", "_get_process_group_backend"),  # overridden
    ),
}

NAMES: dict[str, tuple[str, ...]] = {
    **IN_PLACE,
    "lightning.fabric.utilities.optimizer": ("_optimizers_to_device",),
    "lightning.fabric.strategies.launchers.subprocess_script": ("_ChildProcessObserver",),
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver": (
        "_child_processes",
    ),
    "lightning.pytorch.strategies.launchers": (
        *("_MultiProcessingLauncher", "_SubprocessScriptLauncher"),
    ),
    "lightning.pytorch.plugins.io.AsyncCheckpointIO": ("_error", "_executor"),
    "lightning.pytorch.plugins.io.wrapper": ("_WrappingCheckpointIO",),
    "lightning.pytorch.utilities.exceptions": ("_TunerExitException",),
    "lightning.pytorch.LightningModule": (
        *("_apply_batch_transfer_handler", "_compiler_ctx", "_device", "_trainer"),
    ),
    "lightning.pytorch.Trainer": (
        *("_accelerator_connector", "_active_loop", "_data_connector", "_loggers", "_results"),
        *("_signal_connector", "_val_check_time_interval"),
    ),
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": (
        *("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    ),
    "lightning.pytorch.loops._FitLoop": ("_combined_loader", "_data_fetcher", "_data_source"),
    "lightning.pytorch.loops._EvaluationLoop": (
        *("_data_fetcher", "_evaluation_step", "_max_batches"),
    ),
    "lightning.pytorch.loops._PredictionLoop": ("_data_fetcher", "_predict_step"),
    "lightning.pytorch.loops.fetchers": ("_PrefetchDataFetcher",),
    "lightning.pytorch.loops._TrainingEpochLoop": (
        *IN_PLACE["lightning.pytorch.loops._TrainingEpochLoop"],
        *("_broadcast_sigterm_tensor", "_should_check_val_fx"),
    ),
    "lightning.pytorch.utilities.CombinedLoader": ("_mode",),
    "lightning.pytorch.callbacks.ModelCheckpoint": (
        *("_last_checkpoint_saved", "_link_checkpoint", "_save_last_checkpoint"),
    ),
    "lightning.pytorch.callbacks.StochasticWeightAveraging": ("_average_model",),
    "lightning.pytorch.callbacks.ThroughputMonitor": ("_throughputs",),
    "lightning.pytorch.callbacks.WeightAveraging": (
        *("_average_model", "_copy_average_to_current", "_device", "_swap_models"),
    ),
}
"""Private names by their owner."""

MultiProcessingLauncher = _MultiProcessingLauncher
SubprocessScriptLauncher = _SubprocessScriptLauncher
PrefetchDataFetcher = _PrefetchDataFetcher
TunerExitException = _TunerExitException
WrappingCheckpointIO = _WrappingCheckpointIO
optimizers_to_device = _optimizers_to_device

TRAINER = "_trainer"
"""The attribute in which a LightningModule has its Trainer, or ``None``."""

MODULE_DEVICE = "_device"
"""The attribute of a LightningModule that ``module.device`` reads."""

LOGGERS = "_loggers"
"""The attribute in which a Trainer has its loggers."""

AVERAGING_WALKS = ("_swap_models", "_copy_average_to_current")
"""Methods of WeightAveraging that walk through the module and its average."""


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The Trainer that a module is attached to; ``module.trainer`` raises where there is none."""
    return getattr(module, TRAINER, None)


def set_device(module: LightningModule, device: Any) -> None:
    """Sets what ``module.device`` says, without moving anything."""
    module._device = device


def is_compiled(module: LightningModule) -> bool:
    """Whether ``torch.compile`` was called with the LightningModule itself."""
    return module._compiler_ctx is not None


def replace_transfer(
    module: LightningModule, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Puts another method in the place of the one that moves batches; returns what undoes it.

    Args:
        module: The module whose batches are moved.
        make: Takes the method and gives the one to run in its place.
    """
    module.__dict__["_apply_batch_transfer_handler"] = make(module._apply_batch_transfer_handler)
    return lambda: module.__dict__.pop("_apply_batch_transfer_handler", None)


def deals_out_data(trainer: Trainer, deals: bool) -> None:
    """Says whether the Trainer puts DistributedSamplers into loaders, before it makes them."""
    trainer._accelerator_connector.use_distributed_sampler = deals


def attach_data(trainer: Trainer, module: LightningModule, **data: Any) -> None:
    """Gives data to a Trainer and prepares it, as ``fit`` does before anything runs.

    Args:
        trainer: The Trainer.
        module: The module to train.
        data: ``datamodule`` or ``train_dataloaders``.
    """
    trainer._data_connector.attach_data(module, **data)
    trainer._data_connector.prepare_data()


def fit_data(trainer: Trainer) -> Any:
    """What the training loader of ``trainer`` is, or what it is had from."""
    return trainer.fit_loop._data_source.dataloader()


def logged_results(trainer: Trainer) -> Any:
    """What ``self.log`` has kept of this epoch: name of the hook, value before any reduction."""
    return trainer._results


def combined_loader(trainer: Trainer) -> Any:
    """What the running loop draws several loaders' batches from at once; ``None``: no such."""
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    return None if combined is None or combined._mode == "sequential" else combined


def validates_by_time(trainer: Trainer) -> bool:
    """Whether ``val_check_interval`` is a time."""
    return trainer._val_check_time_interval is not None  # type: ignore[attr-defined]


def replace_check_for_validation(
    trainer: Trainer, decide: Callable[[Callable[[], bool]], bool]
) -> None:
    """Lets ``decide`` say after a batch whether to validate; it is given Lightning's own answer."""
    loop = trainer.fit_loop.epoch_loop
    own = type(loop)._should_check_val_fx
    loop.__dict__["_should_check_val_fx"] = lambda fetcher: decide(lambda: own(loop, fetcher))


def replace_check_for_sigterm(trainer: Trainer, check: Callable[[], None]) -> None:
    """Runs ``check`` before each batch in place of the exchange on the device."""
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = check


def keeps_link_to_last(callback: Callback, keeps: bool) -> None:
    """Whether a ModelCheckpoint goes on to take what it has saved for its last checkpoint."""
    if keeps:
        callback.__dict__.pop("_save_last_checkpoint", None)
    else:
        callback.__dict__["_save_last_checkpoint"] = lambda *_, **__: None


def throughputs(callback: Callback) -> list[Any]:
    """The counters of a ThroughputMonitor."""
    return list(callback._throughputs.values())  # type: ignore[attr-defined]


def average_of(callback: Any) -> Any:
    """The copy of the module that a callback averages in; ``None`` before its setup."""
    return callback._average_model


def averaging_device(callback: Any) -> Any:
    """The device that a WeightAveraging was asked to keep its copy on."""
    return callback._device


def set_averaging_device(callback: Any, device: Any) -> None:
    """Asks a WeightAveraging for another device."""
    callback._device = device


def forget_children(thread: Any) -> None:
    """Lets a thread that watches over child processes see none any more; nothing for others."""
    if isinstance(thread, _ChildProcessObserver):
        thread._child_processes = []


def replace_sigterm_notifier(trainer: Trainer, handler: Callable[..., None]) -> None:
    """Lets ``handler`` take SIGTERM, before the Trainer registers its own."""
    trainer._signal_connector.__dict__["_sigterm_notifier_fn"] = handler


def replace_requeue_handler(trainer: Trainer, handler: Callable[..., None]) -> Callable[..., None]:
    """Lets ``handler`` take SLURM's signal, before the Trainer registers its own; returns that."""
    connector = trainer._signal_connector
    connector.__dict__["_slurm_sigusr_handler_fn"] = handler
    return partial(type(connector)._slurm_sigusr_handler_fn, connector)


def handle_fetcher(loop: Any, handle: Callable[[Any], None]) -> None:
    """Gives ``handle`` what fetches the batches of ``fit_loop``, each time it may be new."""

    def setup_data() -> None:
        type(loop).setup_data(loop)
        handle(loop._data_fetcher)

    loop.__dict__["setup_data"] = setup_data


def handle_evaluation(loop: Any, epochs: Any) -> None:
    """Lets ``epochs`` change how the epochs of a loop that evaluates end.

    Args:
        loop: The loop.
        epochs: ``shorten`` is given the number of batches of each loader, to change, each time it
            may be new, ``join`` what fetches them, before each run.
    """
    name = "_max_batches" if hasattr(loop, "_max_batches") else "max_batches"

    def setup_data() -> None:
        type(loop).setup_data(loop)
        epochs.shorten(getattr(loop, name))

    def reset() -> None:
        type(loop).reset(loop)
        epochs.join(loop._data_fetcher)

    loop.__dict__.update(setup_data=setup_data, reset=reset)


def replace_evaluation_steps(
    loop: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Puts what ``make`` gives in the place of what evaluates a batch, its hooks included."""
    name = "_evaluation_step" if hasattr(loop, "_evaluation_step") else "_predict_step"
    loop.__dict__[name] = make(getattr(type(loop), name).__get__(loop))


def replace_link(callback: Callback, link: Callable[..., None] | None) -> None:
    """Lets ``link`` make the link of ``save_last="link"``; ``None``: ModelCheckpoint itself."""
    if link is None:
        callback.__dict__.pop("_link_checkpoint", None)
    else:
        callback.__dict__["_link_checkpoint"] = link


def last_saved(callback: Any) -> str:
    """Path of what a ModelCheckpoint has saved last."""
    return callback._last_checkpoint_saved


def in_thread_of(plugin: AsyncCheckpointIO, work: Callable[[], None]) -> None:
    """Does something in the thread that writes checkpoints, unless writing has failed.

    Args:
        plugin: The plugin; where its thread has not begun, the work is done at once.
        work: What to do; its error is the plugin's.
    """

    def do() -> None:
        try:
            if plugin._error is None:
                work()
        except BaseException as error:
            plugin._error = error

    if plugin._executor is None:
        work()
    else:
        plugin._executor.submit(do)
