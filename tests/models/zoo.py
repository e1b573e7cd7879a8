"""Small models, ordinary and awkward, that the tests cut into stages."""

from tests.models import (
    awkward,
    families,
    fields,
    hooked,
    ordinary,
    recurrent,
    timm_models,
    transformers_models,
)
from tests.models.registry import WIDTH, ZOO, Arguments, Chain, Model

__all__ = [
    "WIDTH",
    "ZOO",
    "Arguments",
    "Chain",
    "Model",
    "awkward",
    "families",
    "fields",
    "hooked",
    "ordinary",
    "recurrent",
    "timm_models",
    "transformers_models",
]
