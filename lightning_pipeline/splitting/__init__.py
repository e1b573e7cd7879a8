"""Cutting an arbitrary module into pipeline stages: record a call, partition it, run its parts."""

from lightning_pipeline.errors import ElsewhereError, SplitError
from lightning_pipeline.splitting.cost import CPU_RATES, CUDA_RATES, Rates
from lightning_pipeline.splitting.ir import Value, ValueRef
from lightning_pipeline.splitting.partition import (
    cuts_at,
    partition,
    partition_uniform,
    repeated_blocks,
)
from lightning_pipeline.splitting.placeholder import (
    UNPLACED,
    ElsewhereBuffer,
    ElsewhereParameter,
    is_elsewhere,
    release,
    restore,
)
from lightning_pipeline.splitting.program import (
    ChangedSetting,
    Program,
    is_same,
    version_of,
)
from lightning_pipeline.splitting.record import record
from lightning_pipeline.splitting.stage import StageFunction
from lightning_pipeline.splitting.state import StateItem, canonical_names, state_items

__all__ = [
    "CPU_RATES",
    "CUDA_RATES",
    "UNPLACED",
    "ChangedSetting",
    "ElsewhereBuffer",
    "ElsewhereError",
    "ElsewhereParameter",
    "Program",
    "Rates",
    "SplitError",
    "StageFunction",
    "StateItem",
    "Value",
    "ValueRef",
    "canonical_names",
    "cuts_at",
    "is_elsewhere",
    "is_same",
    "partition",
    "partition_uniform",
    "record",
    "release",
    "repeated_blocks",
    "restore",
    "state_items",
    "version_of",
]
