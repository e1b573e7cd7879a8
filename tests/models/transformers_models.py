"""Models of Hugging Face transformers, tiny and with random weights."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import transformers as hf
from torch import Tensor, nn

from tests.models.registry import Arguments, images, register

VOCABULARY = 37
LONGEST = 32
LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TOWER: dict[str, Any] = {"num_hidden_layers": 2, "projection_dim": 8}
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, **LAYERS}
DECODER = {**SMALL, "num_key_value_heads": 2, "use_cache": False}
COUNTED = "return their number as the loss's `weight`, [means.md](means.md)"


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def text(batch: int, length: int) -> Arguments:
    found = ids(batch, length)
    return (), {"input_ids": found, "labels": found}


def padded_text(batch: int, length: int) -> Arguments:
    """Texts that end at different places, each with as many tokens that count as any other."""
    found = ids(batch, length)
    mask = torch.ones_like(found)
    for row, masked in enumerate(mask):
        masked[length - 1 - row % 2 :] = 0
    labels = found.masked_fill(mask == 0, -100)
    labels[1::2, 1] = found[1::2, 1]
    labels[::2, 1] = -100
    return (), {"input_ids": found, "attention_mask": mask, "labels": labels}


def left_padded_text(batch: int, length: int) -> Arguments:
    (args, kwargs) = padded_text(batch, length)
    return args, {name: tensor.flip(1) for name, tensor in kwargs.items() if name != "labels"}


def pairs_of_texts(batch: int, length: int) -> Arguments:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, -2:] = 0
    return (), {
        "input_ids": ids(batch, length),
        "attention_mask": mask,
        "labels": ids(batch, length - 3),
    }


def labelled_text(batch: int, length: int) -> Arguments:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, -2:] = 0
    kinds = torch.arange(length).expand(batch, -1) // (length // 2 + 1)
    return (), {
        "input_ids": ids(batch, length),
        "attention_mask": mask,
        "token_type_ids": kinds,
        "labels": torch.randint(0, 3, (batch,)),
    }


def labelled_images(batch: int, size: int) -> Arguments:
    (pixels,), _ = images(batch, size)
    return (), {
        "pixel_values": pixels,
        "labels": torch.randint(0, 3, (batch,)),
        "interpolate_pos_encoding": True,
    }


def speech(batch: int, length: int) -> Arguments:
    return (), {"input_features": torch.randn(batch, 8, 40), "labels": ids(batch, length)}


def captions(batch: int, length: int) -> Arguments:
    found = ids(batch, length)
    found[:, -1] = 2  # the end of the text, at which CLIP looks
    return (), {
        "input_ids": found,
        "attention_mask": torch.ones_like(found),
        "pixel_values": torch.randn(batch, 3, 16, 16),
        "return_loss": True,
    }


# Hugging Face computes norms, softmaxes and the losses of language models in 32 bits whatever the
# dtype. They round alike on a device and on microbatches if the shares are powers of two.
SIZES = ((4, 8), (2, 11))
TEXTS: dict[str, Any] = {"inputs": text, "sizes": SIZES, "loss_dtype": torch.float32}
PADDED = {**TEXTS, "inputs": padded_text}


@register(**TEXTS)
def hf_llama() -> nn.Module:
    """`LlamaForCausalLM` with labels"""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


@register(**PADDED, condition=f"labels of -100: {COUNTED}")
def hf_llama_eager_tied_padded() -> nn.Module:
    """`LlamaForCausalLM`, eager attention, tied embeddings, padding, labels of -100"""
    config = hf.LlamaConfig(
        **DECODER, tie_word_embeddings=True, attn_implementation="eager", pad_token_id=0
    )
    return hf.LlamaForCausalLM(config)


@register(left_padded_text, SIZES)
def hf_llama_left_padded() -> nn.Module:
    """`LlamaForCausalLM` without labels, padding on the left"""
    return hf_llama()


@register(**TEXTS, condition="`use_reentrant=False`; a layer stays whole")
def hf_llama_checkpointed() -> nn.Module:
    """`LlamaForCausalLM` after `gradient_checkpointing_enable()`"""
    model: Any = hf_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@register(**TEXTS, refusal="for a cache of Hugging Face: use_cache=False")
def hf_llama_with_cache() -> nn.Module:
    """`LlamaForCausalLM` with `use_cache=True`"""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, "use_cache": True}))


@register(**TEXTS)
def hf_qwen3() -> nn.Module:
    """`Qwen3ForCausalLM`"""
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=4))


@register(**TEXTS, separable=False, condition="the routers' loss is that of a microbatch")
def hf_mixtral() -> nn.Module:
    """`MixtralForCausalLM` with `output_router_logits=True`"""
    config = hf.MixtralConfig(
        **DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation="eager",  # the other ones know no float64
    )
    return hf.MixtralForCausalLM(config)


@register(**TEXTS)
def hf_gpt2() -> nn.Module:
    """`GPT2LMHeadModel`, tied embeddings"""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=16,
        n_layer=3,
        n_head=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


@register(labelled_text, SIZES)
def hf_bert() -> nn.Module:
    """`BertForSequenceClassification`, padded"""
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3))


@register(pairs_of_texts, SIZES)
def hf_t5() -> nn.Module:
    """`T5ForConditionalGeneration`, tied embeddings of encoder, decoder and head"""
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


@register(labelled_images, ((4, 16), (2, 24)))
def hf_vit() -> nn.Module:
    """`ViTForImageClassification`, images of several sizes"""
    config = hf.ViTConfig(**LAYERS, image_size=16, patch_size=4, num_labels=3)
    return hf.ViTForImageClassification(config)


@register(speech, SIZES)
def hf_whisper() -> nn.Module:
    """`WhisperForConditionalGeneration`"""
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=20,
        max_target_positions=LONGEST,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hf.WhisperForConditionalGeneration(config)


@register(captions, SIZES, separable=False, condition="contrasts the samples of a microbatch")
def hf_clip() -> nn.Module:
    """`CLIPModel` with `return_loss=True`"""
    config = hf.CLIPConfig(
        text_config={**SMALL, **TOWER, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**LAYERS, **TOWER, "image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    return hf.CLIPModel(config)


class Finetuning(L.LightningModule):
    """A language model's own loss over the tokens that count, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf_llama()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return {"loss": loss, "weight": (batch["labels"][:, 1:] != -100).sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        out = self.model(**batch)
        self.log("val_loss", out.loss)
        self.log("val_size", out.logits.abs().mean(), batch_size=len(out.logits))
        return {"loss": out.loss, "weight": (batch["labels"][:, 1:] != -100).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


def answers(seed: int) -> dict[str, Tensor]:
    """A batch of padded texts in which 4, 2, 1 and 1 tokens count."""
    torch.manual_seed(seed)
    found = ids(4, 9 + seed % 2)
    mask, labels = torch.ones_like(found), torch.full_like(found, -100)
    for row, count in enumerate((4, 2, 1, 1)):
        mask[row, 7 + row % 3 :] = 0
        labels[row, 3 : 3 + count] = found[row, 3 : 3 + count]
    return {"input_ids": found, "attention_mask": mask, "labels": labels}
