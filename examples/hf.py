"""A causal language model of transformers, trained whole or with LoRA, as a LightningModule.

Needs `pip install "lightning-pipeline[hf]"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from .text import LanguageModel

Batch = tuple[Tensor, Tensor]
EXTRA = (
    "This model needs transformers and peft, and {name} is not installed. Install them with: "
    'pip install "lightning-pipeline[hf]"'
)


class CausalLM(LanguageModel):
    """A language model whose weights are random or from a folder or hub, and its adapters.

    Args:
        base: Folder or hub name of the model to begin with; `None` makes a small Llama with random
            weights from the four arguments that follow.
        vocabulary: Codes of a token.
        width: Features of a token.
        depth: Decoder layers.
        heads: Attention heads; they divide `width`.
        rank: Rank of the LoRA adapters on all linear layers but the last (Hu et al. 2021), which
            alone are trained then; 0 trains all weights and has no adapters.
        learning_rate: Where the cosine schedule begins; it ends at zero after the last epoch.
        save_to: Folder for what was trained, in the form of `save_pretrained`: the adapters, or
            the whole model if `rank` is 0; `None` saves nothing.

    Raises:
        ModuleNotFoundError: If transformers or peft is not installed.
    """

    def __init__(
        self,
        base: str | None = None,
        vocabulary: int = 128,
        width: int = 64,
        depth: int = 6,
        heads: int = 4,
        rank: int = 8,
        learning_rate: float = 5e-3,
        save_to: str | None = None,
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters(ignore="save_to")
        self.save_to = save_to
        self.model = language_model(base, vocabulary, width, depth, heads)
        if rank:
            self.model = with_adapters(self.model, rank)
        self.val_accuracy = MulticlassAccuracy(self.model.config.vocab_size, average="micro")

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes (batch, block) to logits (batch, block, vocabulary) of the next code."""
        return self.model(input_ids=codes, use_cache=False).logits

    def on_fit_end(self) -> None:
        if self.save_to is not None and self.trainer.is_global_zero:
            self.model.save_pretrained(self.save_to)


def language_model(base: str | None, vocabulary: int, width: int, depth: int, heads: int) -> Any:
    """Loads a causal language model, or makes a small Llama; see :class:`CausalLM`."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(EXTRA.format(name=error.name)) from error
    if base is not None:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.get_default_dtype())
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        # Larger than usual: the frozen last layer of a random base must be able to be certain.
        initializer_range=width**-0.5,
        # Characters have no codes for the begin and the end of a text.
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def with_adapters(model: nn.Module, rank: int) -> Any:
    """Freezes a model and puts LoRA adapters on all its linear layers but the last."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(EXTRA.format(name=error.name)) from error
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)
