"""A causal language model of transformers, trained whole or with LoRA, as a LightningModule.

Needs `pip install "lightning-pipeline[hf]"`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]
EXTRA = (
    "This model needs transformers and peft, and {name} is not installed. Install them with: "
    'pip install "lightning-pipeline[hf]"'
)


class CausalLM(L.LightningModule):
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
        super().__init__()
        self.save_hyperparameters(ignore="save_to")
        self.learning_rate = learning_rate
        self.save_to = save_to
        self.model = language_model(base, vocabulary, width, depth, heads)
        if rank:
            self.model = with_adapters(self.model, rank)
        self.val_accuracy = MulticlassAccuracy(self.model.config.vocab_size, average="micro")

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes (batch, block) to logits (batch, block, vocabulary) of the next code."""
        return self.model(input_ids=codes, use_cache=False).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        codes, targets = batch
        loss = F.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        codes, targets = batch
        logits = self(codes).flatten(0, 1)
        self.val_accuracy(logits, targets.flatten())
        loss = F.cross_entropy(logits, targets.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        codes, targets = batch
        loss = F.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
        self.log("test_loss", loss, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[CosineAnnealingLR]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate)
        epochs = max(self.trainer.max_epochs or 1, 1)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=epochs)]

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
