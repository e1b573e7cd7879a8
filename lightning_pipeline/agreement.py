"""Whether the ranks of a pipeline have logged the same in the hooks between their steps."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeline.lightning_private import logged_results
from lightning_pipeline.mesh import Mesh

_CLOSE = 1e-5  # relative; sums over the same numbers may round otherwise
_Logged: TypeAlias = dict[tuple[str, str], float]  # by hook and name


class Agreement:
    """Compares what hooks of the training log, and tells of what differs.

    What a step logs is the same on all ranks. A hook logs what its own rank holds: a sum over
    ``self.parameters()`` is that of a part of the model. The ranks compare after 1, 2, 4, 8, ...
    batches, so that it costs nothing.

    Args:
        module: The user's LightningModule.
        mesh: The rank's place, groups built.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh
        self._batches = 0
        self._told: set[tuple[str, str]] = set()

    def check(self) -> None:
        """Compares, if it is time to, on every rank of the pipeline; once a training batch.

        Two ranks that logged different numbers under one name are warned of, once for each name.
        """
        batches, self._batches = self._batches, self._batches + 1
        if self._mesh.sizes.pipeline == 1 or batches & (batches - 1) or not batches:
            return
        ranks: list[_Logged] = [{}] * self._mesh.sizes.pipeline
        dist.all_gather_object(ranks, self._logged(), self._mesh.pipeline_group)
        for key in dict.fromkeys(key for logged in ranks for key in logged):
            values = [logged[key] for logged in ranks if key in logged]
            if all(_is_same(value, values[0]) for value in values) or key in self._told:
                continue
            self._told.add(key)
            hook, name = key
            rank_zero_warn(
                f"self.log({name!r}) in {hook} has another value on each rank of the pipeline, "
                f"{', '.join(f'{value:.6g}' for value in values)}, and loggers get that of rank 0: "
                "a hook sees the parameters and gradients of its own rank. Norms of the whole "
                "model are lightning.pytorch.utilities.grad_norm(self, 2) and "
                "torch.nn.utils.get_total_norm; sum anything else over the ranks with "
                "torch.distributed.all_reduce before it is logged."
            )

    def _logged(self) -> _Logged:
        """What hooks have logged in this epoch, on all ranks."""
        results = logged_results(self._module.trainer)
        return {
            (result.meta.fx, result.meta.name): float(result.value)
            for result in (results or {}).values()
            if result.is_tensor and result.meta.fx != "training_step"
            if not result.meta.sync.rank_zero_only
        }


def _is_same(value: float, other: float) -> bool:
    both_nan = math.isnan(value) and math.isnan(other)
    return both_nan or math.isclose(value, other, rel_tol=_CLOSE)
