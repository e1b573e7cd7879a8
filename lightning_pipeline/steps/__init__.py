"""The user's step: its calls surveyed, placed on stages, and run part by part."""

from lightning_pipeline.steps.analyst import Analyst
from lightning_pipeline.steps.attributes import ABSENT, append, set_attributes
from lightning_pipeline.steps.buffers import MicrobatchBuffers
from lightning_pipeline.steps.carrying import Carries
from lightning_pipeline.steps.dependence import gradient_missing
from lightning_pipeline.steps.execution import Manner, compiled
from lightning_pipeline.steps.handmade import HandMade
from lightning_pipeline.steps.leftovers import modes_of
from lightning_pipeline.steps.microbatch import Microbatch
from lightning_pipeline.steps.patches import patched
from lightning_pipeline.steps.pending import TensorMeta
from lightning_pipeline.steps.placement import PartitionSpec, Placement, place
from lightning_pipeline.steps.plan import StepPlan, describe_calls, plan_step
from lightning_pipeline.steps.recomputing import recomputed_blocks
from lightning_pipeline.steps.runner import Runner
from lightning_pipeline.steps.streams import (
    kept_random_state,
    mix,
    random_state,
    seed_all,
    set_random_state,
    stream,
)
from lightning_pipeline.steps.survey import Request, Survey, survey

__all__ = [
    "ABSENT",
    "Analyst",
    "Carries",
    "HandMade",
    "Manner",
    "Microbatch",
    "MicrobatchBuffers",
    "PartitionSpec",
    "Placement",
    "Request",
    "Runner",
    "StepPlan",
    "Survey",
    "TensorMeta",
    "append",
    "compiled",
    "describe_calls",
    "gradient_missing",
    "kept_random_state",
    "mix",
    "modes_of",
    "patched",
    "place",
    "plan_step",
    "random_state",
    "recomputed_blocks",
    "seed_all",
    "set_attributes",
    "set_random_state",
    "stream",
    "survey",
]
