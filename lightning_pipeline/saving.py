"""Checkpoints of a strategy whose ranks hold parts of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline import checkpoint as checkpoints
from lightning_pipeline import sharded
from lightning_pipeline.failing import FailingStrategy
from lightning_pipeline.materialising import is_unplaced
from lightning_pipeline.pipeline import Pipeline
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
    def _position(self) -> Position | None:
        return None if self._pipeline is None else self._pipeline.engine.position

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        checkpoints.load(self.lightning_module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Not to the device yet: before the first batch this is the state of the whole model.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
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
        if whole is not None:
            if os.path.isdir(filepath):
                with sharded.replaced(filepath):
                    super().save_checkpoint(whole, filepath, storage_options)
            else:
                super().save_checkpoint(whole, filepath, storage_options)
        self.barrier()

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
        if os.path.isdir(checkpoint_path):
            return sharded.load(checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _drop_foreign_state(self) -> None:
        """Optimizer state of parameters that are elsewhere goes, the rest follows its parameter."""
        for optimizer in self.optimizers:
            for parameter in [p for p in optimizer.state if is_elsewhere(p)]:
                del optimizer.state[parameter]
        _optimizers_to_device(self.optimizers, self.root_device)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
