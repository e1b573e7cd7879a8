"""The user's step: its calls surveyed, placed on stages, and run part by part."""

from lightning_pipeline.steps.analyst import Analyst
from lightning_pipeline.steps.attributes import ABSENT, append, set_attributes
from lightning_pipeline.steps.carrying import Carries
from lightning_pipeline.steps.handmade import HandMade
from lightning_pipeline.steps.patches import patched
from lightning_pipeline.steps.pending import TensorMeta
from lightning_pipeline.steps.plan import (
    PartitionSpec,
    Placement,
    StepPlan,
    describe_calls,
    place,
    plan_step,
)
from lightning_pipeline.steps.runner import Microbatch, Runner
from lightning_pipeline.steps.streams import mix, random_state, set_random_state, stream
from lightning_pipeline.steps.survey import Request, Survey, survey

__all__ = [
    "ABSENT",
    "Analyst",
    "Carries",
    "HandMade",
    "Microbatch",
    "PartitionSpec",
    "Placement",
    "Request",
    "Runner",
    "StepPlan",
    "Survey",
    "TensorMeta",
    "append",
    "describe_calls",
    "mix",
    "patched",
    "place",
    "plan_step",
    "random_state",
    "set_attributes",
    "set_random_state",
    "stream",
    "survey",
]
