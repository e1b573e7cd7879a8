"""Pipeline parallelism for PyTorch Lightning: ``Trainer(strategy="pipeline")``."""

from lightning_pipeline.versions import check_versions

check_versions()

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipeline.errors import ElsewhereError, PipelineError, SplitError, StepError
from lightning_pipeline.plan import Plan
from lightning_pipeline.strategy import PipelineStrategy
from lightning_pipeline.timeline import PipelineTimeline

__all__ = [
    "ElsewhereError",
    "PipelineError",
    "PipelineStrategy",
    "PipelineTimeline",
    "Plan",
    "SplitError",
    "StepError",
]
__version__ = "0.1.0"

PipelineStrategy.register_strategies(StrategyRegistry)
