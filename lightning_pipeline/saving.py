"""Checkpoints of a strategy whose ranks hold parts of the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline import checkpoint as checkpoints
from lightning_pipeline import sharded
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.failing import FailingStrategy
from lightning_pipeline.files import WholeFiles, check_lightning, first_line, in_turn
from lightning_pipeline.lightning_private import (
    WrappingCheckpointIO,
    last_saved,
    optimizers_to_device,
    replace_link,
    trainer_of,
)
from lightning_pipeline.materialising import is_unplaced
from lightning_pipeline.momenta import check_optimizer_states
from lightning_pipeline.pipeline import Pipeline
from lightning_pipeline.replacing import is_remote, link, standing
from lightning_pipeline.splitting import is_elsewhere
from lightning_pipeline.weights import copied
from lightning_pipeline.whereabouts import Position


class SavingStrategy(FailingStrategy):
    """A FailingStrategy that saves and loads, as one file or as a folder."""

    _pipeline: Pipeline | None = None
    _shards_checkpoints = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: list[tuple[Optimizer, Mapping[str, Any]]] = []

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        io = self._checkpoint_io
        if io is None:
            self._checkpoint_io = io = WholeFiles()
        elif isinstance(io, WrappingCheckpointIO) and (
            io.checkpoint_io is None or type(io.checkpoint_io) is TorchCheckpointIO
        ):
            io.checkpoint_io = WholeFiles()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def _begin(self) -> None:
        super()._begin()
        for callback in self._model_checkpoints():
            replace_link(callback, self._link)

    @override
    def _end(self) -> None:
        super()._end()
        for callback in self._model_checkpoints():
            replace_link(callback, None)

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        trainer = trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else trainer.checkpoint_callbacks
        return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]

    def _link(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """Does what ModelCheckpoint does for ``save_last="link"``, at once."""
        if self.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            in_turn(self.checkpoint_io, partial(link, filepath, linkpath))
        self.barrier()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._failed or not self.is_global_zero:
            return
        links = [
            (last_saved(callback), callback.last_model_path)
            for callback in self._model_checkpoints()
            if callback.save_last == "link"
        ]
        remove = super().remove_checkpoint

        def discard() -> None:
            for saved, last in links:
                # Lightning leads it there only behind this: it would lead nowhere meanwhile.
                if os.path.realpath(last) == os.path.realpath(filepath):
                    link(saved, last)
            remove(filepath)

        in_turn(self.checkpoint_io, discard)

    @property
    @override
    def _position(self) -> Position | None:
        return None if self._pipeline is None else self._pipeline.engine.position

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        with self._fitting_checkpoint():
            checkpoints.load(self.lightning_module, checkpoint["state_dict"], strict)

    @contextmanager
    def _fitting_checkpoint(self) -> Iterator[None]:
        """Errors of a checkpoint that does not fit name its file.

        Raises:
            CheckpointError: If there is one.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            module = self.lightning_module
            assert module is not None
            raise CheckpointError(
                f"The checkpoint {str(module.trainer.ckpt_path)!r} must be of "
                f"{type(module).__name__} as it was built here. {error}\nBuild it with the "
                "hyperparameters that the checkpoint was written with, and the same optimizers, or "
                "continue from another checkpoint."
            ) from error

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Not to the device yet: before the first batch this is the state of the whole model.
        assert self.lightning_module is not None
        states = checkpoint["optimizer_states"]
        with self._fitting_checkpoint():
            check_optimizer_states(self.lightning_module, self.optimizers, states)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if any(map(is_elsewhere, _parameters(optimizer))):
                optimizer.load_state_dict({**state, "state": {}})
                self._waiting.append((optimizer, state))
            else:
                optimizer.load_state_dict(state)
        if self._pipeline is not None and self._pipeline.is_placed:
            self._load_held_state()

    def _load_held_state(self) -> None:
        """Loads what waits for the placement: the optimizer state of this rank's parameters."""
        for optimizer, state in self._waiting:
            saved = [index for group in state["param_groups"] for index in group["params"]]
            entries = dict(state["state"])
            held = {}
            for number, (index, parameter) in enumerate(
                zip(saved, _parameters(optimizer), strict=True)
            ):
                entry = entries.pop(index, None)
                if entry is not None and not is_elsewhere(parameter):
                    held[number] = entry
            groups = optimizer.state_dict()["param_groups"]
            state = copied({**entries, **held})
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._waiting = []
        self._drop_foreign_state()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if not self._may_save(filepath):
            return
        with self._saving():
            self._save(checkpoint, filepath, storage_options)

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if any(is_unplaced(tensor) for _, tensor in checkpoints.walk(checkpoint)):
            raise MisconfigurationException(
                f"No checkpoint can be written to {filepath} before the first batch: the module "
                "was built without memory for its weights, in configure_model or on meta, and "
                "gets them with it. Save behind it, e.g. in on_train_batch_end."
            )
        if self._shards_checkpoints:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        whole = checkpoints.gather(checkpoint, self.mesh, self.root_device)
        failure = None
        if whole is not None:
            try:
                super().save_checkpoint(whole, filepath, storage_options)
            except Exception as error:
                failure = error
        told = self.broadcast(None if failure is None else first_line(failure))
        if failure is not None:
            raise failure
        if told is not None:
            raise CheckpointError(f"Global rank 0 could not write {filepath}: {told}")

    def _save_folder(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options must be None with save_distributed_checkpoint=True, got "
                f"{storage_options!r}: a folder is not written by a CheckpointIO. Remove it, or "
                "set save_distributed_checkpoint=False."
            )
        assert self.lightning_module is not None
        names = [sharded.parameter_names(self.lightning_module, o) for o in self.optimizers]
        sharded.save(checkpoint, self.broadcast(path), self.mesh, names)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        if not is_remote(checkpoint_path):
            checkpoint_path = standing(checkpoint_path)
        elif weights_only is None and str(checkpoint_path).startswith("http"):
            weights_only = True  # otherwise Lightning takes objects of any class from a server
        if os.path.isdir(checkpoint_path):
            loaded = sharded.load(checkpoint_path, weights_only, together=True)
        else:
            loaded = super().load_checkpoint(checkpoint_path, weights_only)
        check_lightning(loaded, checkpoint_path)
        return loaded

    def _drop_foreign_state(self) -> None:
        """Optimizer state of parameters that are elsewhere goes, the rest follows its parameter."""
        for optimizer in self.optimizers:
            for parameter in [p for p in optimizer.state if is_elsewhere(p)]:
                del optimizer.state[parameter]
        optimizers_to_device(self.optimizers, self.root_device)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
