"""How a module that no device can hold is built: without weights, which come with the placement."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_pipeline import sharded
from lightning_pipeline.activities import Observer
from lightning_pipeline.files import check_lightning, is_plain, is_zip
from lightning_pipeline.lightning_private import trainer_of
from lightning_pipeline.materialising import Deferred, has_no_value, is_unplaced
from lightning_pipeline.pipeline import Pipeline
from lightning_pipeline.recipes import Recipes
from lightning_pipeline.refusals import check_whole
from lightning_pipeline.saving import SavingStrategy
from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.weights import fetch, named_for, open_checkpoint, open_weights


class BuildingStrategy(SavingStrategy):
    """A SavingStrategy under which ``configure_model`` allocates no weights."""

    _weights: str | Path | None = None
    _gathers_after_run = True
    _recipes: Recipes | None = None
    _deferred: Deferred | None = None
    _initialised: weakref.ref[pl.LightningModule] | None = None

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds on the host; parameters without memory in ``configure_model``.

        Args:
            empty_init: Whether parameters get no memory; ``None``: in ``configure_model`` they do
                not, in ``Trainer.init_module`` they do.
        """
        if self._recipes is None:
            self._recipes = Recipes()
        hides = self._is_running() if empty_init is None else empty_init
        with self.precision_plugin.tensor_init_context():
            if not hides:
                yield
                return
            with self._recipes.watch():
                yield

    def observe(self, observer: Observer | None) -> None:
        """Tells ``observer`` what the passes of the training do on this rank, or nobody."""
        assert self._pipeline is not None, "the strategy is not set up"
        self._pipeline.engine.observer = observer

    def _is_running(self) -> bool:
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    def _defer_weights(self) -> None:
        """Guards what is on meta until it is placed, and notes where its values come from."""
        module = self.lightning_module
        assert module is not None
        if any(has_no_value(tensor) for *_, tensor in state_items(module)):
            self._recipes = self._recipes or Recipes()
            self._deferred = Deferred(module, self._recipes)
        elif not any(is_unplaced(tensor) for *_, tensor in state_items(module)):
            self._deferred = None
        done = self._initialised is not None and self._initialised() is module
        if self._weights is None or done:
            return
        named = named_for(module, open_weights(self._weights), self._weights)
        self._initialised = weakref.ref(module)
        if self._deferred is not None:
            self._deferred.take(named)
        own = module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in named.items():
                if not is_elsewhere(own[name]):
                    own[name].copy_(fetch(value))

    def _check_deferred(self) -> None:
        """Refuses what cannot go with weights that come with the first batch.

        Raises:
            MisconfigurationException: If a tensor would get no value, or nothing would be left.
        """
        if self._deferred is None:
            return
        module = self.lightning_module
        assert module is not None
        lazy = next((name for name, p in module.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            raise MisconfigurationException(
                f"{lazy!r} is lazy, so its shape comes with a forward, but the module was built "
                "without memory for its weights, which come behind it. Give its input size, e.g. "
                "nn.Linear(64, 10) for nn.LazyLinear(10), or build the module in __init__."
            )
        self._deferred.check()
        if self._start_method != "popen" and self.mesh.sizes.pipeline > 1:
            raise MisconfigurationException(
                f"{type(module).__name__} was built without memory for its weights, so it stays "
                "spread over the processes after the run, but those of "
                f"start_method={self._start_method!r} end with it. Set start_method='popen', or "
                "build the module in __init__."
            )

    def _kept_pipeline(self, module: pl.LightningModule) -> Pipeline | None:
        """The pipeline of an earlier run that left the module spread."""
        kept = self._pipeline
        if kept is not None and kept.is_placed and kept.module is module:
            return kept
        if self._deferred is None:
            check_whole(module)
        return None

    def _leave_pipeline(self) -> None:
        """Ends a run; the module is whole again if it shall and can be."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        too_large = pipeline.placed.began_without_weights and self.mesh.sizes.pipeline > 1
        if self._gathers_after_run and not too_large:
            pipeline.put_back()
            self._pipeline = None
            return
        pipeline.pause()
        if self._gathers_after_run and pipeline.is_placed:
            rank_zero_warn(
                f"{type(pipeline.module).__name__} was built without memory for its weights, so "
                "after the run each rank still holds its part only. Go on with the same Trainer, "
                "or with the checkpoint of trainer.save_checkpoint(PATH). "
                "PipelineStrategy(gather_after_run=False) says the same without this warning."
            )

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        module = self.lightning_module
        # Not the format before torch 1.6, of which no tensor can be read alone.
        local = sharded.is_folder(checkpoint_path) or is_zip(checkpoint_path)
        meta = module is not None and any(t.is_meta for *_, t in state_items(module))
        if not (local and meta and is_plain(self.checkpoint_io)):
            return super().load_checkpoint(checkpoint_path, weights_only)
        loaded = open_checkpoint(checkpoint_path, weights_only, together=True)
        check_lightning(loaded, checkpoint_path)
        return loaded

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self._defer_weights()
        elsewhere = {n for *_, n, t in state_items(self.lightning_module) if is_elsewhere(t)}
        state = checkpoint["state_dict"]
        read = {name: v if name in elsewhere else fetch(v) for name, v in state.items()}
        super().load_model_state_dict({**checkpoint, "state_dict": read}, strict)
        if self._deferred is not None:
            with self._fitting_checkpoint():
                self._deferred.take(state)
