"""What a pipeline cannot run, said before the first step and in the user's words."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_pipeline.files import is_plain
from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.splitting.torch_private import is_compiled

_SEVERAL_OPTIMIZERS = (
    "Several optimizers are not possible in a pipeline yet. If one backward of a sum of losses "
    "will do, use one optimizer with a group of parameters for each part: "
    "torch.optim.AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr': 1e-4}]). If not (a GAN), "
    "train the parts in turn, each as a LightningModule and a Trainer of its own, or without a "
    "pipeline: Trainer(strategy='ddp')."
)


def check_uncut(module: LightningModule, kinds: tuple[type[torch.nn.Module], ...]) -> None:
    """Refuses classes to be computed again of which there is no module.

    Raises:
        MisconfigurationException: If there is one.
    """
    for kind in kinds:
        if not any(isinstance(child, kind) for child in module.modules()):
            below = (child for child in module.modules() if child is not module)
            blocks = {type(child).__name__ for child in below if child._modules}
            raise MisconfigurationException(
                f"activation_checkpointing must list classes of modules of the model, but "
                f"{type(module).__name__} has no {kind.__name__}. Its blocks are of "
                f"{', '.join(sorted(blocks)) or 'no class of its own'}: name one of these."
            )


def check_memory(module: LightningModule) -> None:
    """Refuses parameters that share memory without being one.

    Raises:
        MisconfigurationException: Naming two of them.
    """
    parts: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta or is_lazy(parameter) or not parameter.numel():
            continue
        if parameter.layout is not torch.strided:
            continue
        begin = parameter.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        end = begin + (reach + 1) * parameter.element_size()
        key = parameter.untyped_storage().data_ptr()
        for other_begin, other_end, other in parts.setdefault(key, []):
            if begin < other_end and other_begin < end:
                raise MisconfigurationException(
                    f"{other!r} and {name!r} of {type(module).__name__} share memory, but are two "
                    "parameters: on different ranks they would part. Tie them by assigning the "
                    "parameter itself, e.g. head.weight = embedding.weight, and not its data."
                )
        parts[key].append((begin, end, name))


def check_whole(module: LightningModule) -> None:
    """Refuses a module of which an earlier run left only a part on this rank.

    Raises:
        MisconfigurationException: If there is a placeholder in it.
    """
    name = next((name for *_, name, tensor in state_items(module) if is_elsewhere(tensor)), None)
    if name is not None:
        model = type(module).__name__
        raise MisconfigurationException(
            f"strategy='pipeline' must begin with a whole module, but {name!r} of {model} is on "
            "another rank: an earlier run failed, or had PipelineStrategy(gather_after_run=False). "
            f"Go on with the Trainer of that run, load a checkpoint into a new module, "
            f"{model}.load_from_checkpoint(PATH), or set gather_after_run=True there."
        )


def check_module(module: LightningModule, layer_sync: LayerSync | None) -> None:
    """Refuses LightningModules whose optimization cannot be cut.

    Args:
        module: The user's LightningModule.
        layer_sync: What synchronises layers, as the Trainer was asked to.

    Raises:
        MisconfigurationException: If it uses something that a pipeline cannot run.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"strategy='pipeline' needs automatic optimization, but {name} sets "
            "automatic_optimization=False: its training_step calls backward and the optimizer "
            "itself, which would happen once a microbatch and stage. With one optimizer, return "
            "the loss from training_step and remove `self.automatic_optimization = False`. "
            f"{_SEVERAL_OPTIMIZERS}"
        )
    if is_overridden("backward", module):
        raise MisconfigurationException(
            f"strategy='pipeline' runs the backward inside its schedule, so {name}.backward would "
            "never be called. Remove the override; to change gradients use on_after_backward or "
            "configure_gradient_clipping."
        )
    if layer_sync is not None and type(layer_sync) is not TorchSyncBatchNorm:
        raise MisconfigurationException(
            f"strategy='pipeline' cannot run the plugin {type(layer_sync).__name__}: it "
            "synchronises layers over all ranks, of which some hold other layers. Remove it from "
            "Trainer(plugins=...); Trainer(sync_batchnorm=True) synchronises BatchNorm over "
            "replicas."
        )


def check_callbacks(module: LightningModule) -> None:
    """Refuses callbacks that need the whole model, or one device, in the middle of a run.

    Args:
        module: The user's LightningModule, connected to its Trainer.

    Raises:
        MisconfigurationException: If one of the Trainer's callbacks can't work on a part.
    """
    trainer = module.trainer
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, BatchSizeFinder):
            raise MisconfigurationException(
                f"strategy='pipeline' cannot run the callback {name}: it waits for one device to "
                "run out of memory, which would leave the other ranks waiting for ever. Remove it "
                "from Trainer(callbacks=...) or do without Tuner.scale_batch_size, and set the "
                "batch size of the DataLoader; num_microbatches decides how much of a batch is "
                "in memory at once."
            )
        if trainer.state.fn != TrainerFn.FITTING:
            continue
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"strategy='pipeline' cannot run the callback {name}: it ranks the weights of the "
                "whole model and replaces parameters by others, but each rank holds a part of "
                "them. Remove it from Trainer(callbacks=...), and prune the checkpoint of the run "
                "on one device."
            )
        averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
        if averages and any(t.is_meta and not is_elsewhere(t) for *_, t in state_items(module)):
            raise MisconfigurationException(
                f"The callback {name} copies the weights of {type(module).__name__} before the "
                "first batch, but they are on meta and get their values with it. Build the module "
                "without torch.device('meta'), or remove the callback."
            )
        norms = StochasticWeightAveraging.pl_module_contains_batch_norm
        if isinstance(callback, StochasticWeightAveraging) and norms(module):
            raise MisconfigurationException(
                f"strategy='pipeline' cannot run the callback {name} for a model with BatchNorm: "
                "it ends with an epoch that only collects the statistics of whole batches, and a "
                "pipeline sees microbatches. Use WeightAveraging, which averages the statistics "
                "themselves, or another norm, e.g. nn.GroupNorm."
            )


def check_checkpoint_io(plugin: CheckpointIO) -> None:
    """Refuses plugins that would not be asked, because every rank writes its part by itself.

    Raises:
        MisconfigurationException: If it is any but Lightning's own.
    """
    if not is_plain(plugin):
        raise MisconfigurationException(
            "PipelineStrategy(save_distributed_checkpoint=True) writes folders without a "
            f"CheckpointIO, so {type(plugin).__name__} would never be called. Remove it from "
            "Trainer(plugins=...), or set save_distributed_checkpoint=False."
        )


def check_gathering(callbacks: Sequence[Callback]) -> None:
    """Refuses callbacks that need the whole model when the run ends, if it stays spread.

    Raises:
        MisconfigurationException: If there is one.
    """
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise MisconfigurationException(
                f"PipelineStrategy(gather_after_run=False) cannot run the callback "
                f"{type(callback).__name__}: its averaged copy of the model is whole on every rank "
                "when the run ends. Set gather_after_run=True or remove the callback."
            )


def check_start_method(start_method: str, gather_after_run: bool) -> None:
    """Refuses to leave the module spread over processes that end with the run.

    Raises:
        ValueError: If it would be.
    """
    if not gather_after_run and start_method != "popen":
        raise ValueError(
            "gather_after_run=False must go with start_method='popen', got "
            f"{start_method!r}: the processes of the other methods end with the run, and with "
            "them what they hold. Set start_method='popen' or gather_after_run=True."
        )


@contextmanager
def one_optimizer(module: LightningModule) -> Iterator[None]:
    """Says what to do with several optimizers, while Lightning asks for them.

    Lightning's own error would lead to manual optimization, which is refused as well.

    Raises:
        MisconfigurationException: If there are several.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            f"strategy='pipeline' works with one optimizer, but {type(module).__name__}."
            f"configure_optimizers returned several. {_SEVERAL_OPTIMIZERS}"
        ) from None


def check_optimizers(optimizers: Sequence[Optimizer], num_ranks: int) -> None:
    """Refuses optimizers that need more than this rank's parameters, and warns of those that may.

    Args:
        optimizers: Those of the run.
        num_ranks: Ranks of one pipeline.

    Raises:
        MisconfigurationException: If one is L-BFGS, or its step is compiled.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "strategy='pipeline' cannot run LBFGS: its line search needs the whole gradient "
                "on one device. Use an optimizer that treats each parameter by itself, e.g. "
                "torch.optim.AdamW."
            )
        # Lightning gives the whole step to it, as the closure.
        if is_compiled(optimizer.step):
            raise MisconfigurationException(
                "strategy='pipeline' cannot run a compiled optimizer.step: torch.compile would "
                "look into the whole training step, which the optimizer calls. Leave the step of "
                f"{type(optimizer).__name__} as it is; fused=True makes one kernel of it."
            )
    warn_of_optimizers(optimizers, num_ranks)


def warn_of_optimizers(optimizers: Sequence[Optimizer], num_ranks: int) -> None:
    """Warns of optimizers that may need a number over all parameters, which no rank has.

    Args:
        optimizers: Those of the run.
        num_ranks: Ranks of one pipeline.
    """
    kinds: list[type[Optimizer]] = [type(optimizer) for optimizer in optimizers]
    for kind in kinds:
        # torch's own are each exact, but for L-BFGS; subclasses that keep its step are so too.
        if num_ranks > 1 and kind.step.__module__.partition(".")[0] != "torch":
            rank_zero_warn(
                f"{kind.__name__}.step sees the parameters of its own rank only. That is exact if "
                "it updates each parameter by itself, as LARS and LAMB do, but not if it takes a "
                "number over all of them, such as their norm (SAM, Prodigy): take such an "
                "optimizer from torch.optim, e.g. torch.optim.AdamW, or train without a pipeline."
            )


def check_precision(plugin: Precision) -> None:
    """Refuses precisions that put modules of their own in the place of linear layers.

    Raises:
        MisconfigurationException: If it is one of them.
    """
    if isinstance(plugin, (BitsandbytesPrecision, TransformerEnginePrecision)):
        raise MisconfigurationException(
            f"strategy='pipeline' cannot run {type(plugin).__name__}: it replaces nn.Linear by "
            "modules with weights and kernels of another library, which cannot be recorded and "
            "cut. Use Trainer(precision='bf16-mixed') or another precision of torch's own."
        )


def check_module_name(module: LightningModule, name: str | None) -> None:
    """Refuses a ``module`` argument that is not in the LightningModule.

    Raises:
        ValueError: Naming close matches.
    """
    names = [known for known, _ in module.named_modules() if known]
    if name is None or name in names:
        return
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    raise ValueError(
        f"module must be the dotted name of a module in {type(module).__name__}, got {name!r}. "
        f"The name comes from PipelineStrategy(module={name!r}). Close ones are "
        f"{', '.join(map(repr, close))}; module=None finds it by itself."
    )
