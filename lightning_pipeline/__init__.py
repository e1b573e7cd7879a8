"""Pipeline parallelism for PyTorch Lightning: ``Trainer(strategy="pipeline")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipeline.errors import ElsewhereError, PipelineError, SplitError, StepError
from lightning_pipeline.plan import Plan
from lightning_pipeline.strategy import PipelineStrategy

__all__ = [
    "ElsewhereError",
    "PipelineError",
    "PipelineStrategy",
    "Plan",
    "SplitError",
    "StepError",
]
__version__ = "0.1.0"

PipelineStrategy.register_strategies(StrategyRegistry)
