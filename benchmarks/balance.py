"""How even stages are, predicted and measured, against equal blocks and the best cut there is.

    python benchmarks/balance.py [--repeats 7] [--models gpt,unet]

One process, one thread. For 2 and 4 stages each model is recorded and cut as `partition="auto"` and
as `partition="uniform"` would. Every piece between two legal cuts runs forward and backward by
itself; the best cut is exact for these times. Then the stages of all three cuts run in turns. Times
are CPU seconds, the least of the repeats; the table has the largest stage over the mean of the
stages of `auto`, and what `auto` is above the best cut.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_pipeline.placing import SECONDS_PER_BYTE
from lightning_pipeline.splitting import (
    Program,
    StageFunction,
    partition,
    partition_uniform,
    record,
    repeated_blocks,
)

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def gpt() -> Call:
    """GPT-2 whose head over 32k words is about half of it."""
    import transformers as hf

    config = hf.GPT2Config(
        n_layer=6, n_embd=256, n_head=4, vocab_size=32000, n_positions=128, use_cache=False
    )
    words = torch.randint(32000, (2, 128))
    return hf.GPT2LMHeadModel(config), (), {"input_ids": words, "labels": words}


def bert() -> Call:
    """BERT with a classifier."""
    import transformers as hf

    config = hf.BertConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=8000,
    )
    kwargs = {"input_ids": torch.randint(8000, (4, 128)), "labels": torch.arange(4) % 2}
    return hf.BertForSequenceClassification(config), (), kwargs


def t5() -> Call:
    """T5: an encoder of long texts and a decoder of short ones."""
    import transformers as hf

    config = hf.T5Config(
        d_model=192,
        d_kv=48,
        d_ff=768,
        num_layers=4,
        num_heads=4,
        vocab_size=4000,
        decoder_start_token_id=0,
        use_cache=False,
    )
    kwargs = {"input_ids": torch.randint(4000, (4, 128)), "labels": torch.randint(4000, (4, 48))}
    return hf.T5ForConditionalGeneration(config), (), kwargs


def mixtral() -> Call:
    """A mixture of experts."""
    import transformers as hf

    config = hf.MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=4000,
        use_cache=False,
    )
    words = torch.randint(4000, (2, 64))
    return hf.MixtralForCausalLM(config), (), {"input_ids": words, "labels": words}


def resnet() -> Call:
    """A narrow ResNet-50: early blocks have large images, late ones many weights."""
    return Bottlenecks(), (torch.randn(4, 3, 96, 96),), {}


def vit() -> Call:
    """A ViT of width 192."""
    layer = nn.TransformerEncoderLayer(192, 3, 768, 0.1, "gelu", batch_first=True, norm_first=True)
    return Patches(nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)), (PIXELS,), {}


def unet() -> Call:
    """A U-Net whose outer levels have most of the work."""
    return UNet(), (torch.randn(2, 3, 96, 96),), {}


def lstm() -> Call:
    """Four LSTMs, for which torch counts no FLOPs, and a large head."""
    return Recurrent(), (torch.randint(4000, (8, 48)),), {}


PIXELS = torch.randn(4, 3, 96, 96)
MODELS: dict[str, Callable[[], Call]] = {
    f.__name__: f for f in (gpt, resnet, unet, vit, bert, t5, lstm, mixtral)
}


class Bottleneck(nn.Module):
    """Block of a ResNet-50."""

    def __init__(self, inner: int, outer: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.skip = nn.Conv2d(inner, outer, 1, stride) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, channels, height, width]."""
        return torch.relu(self.body(x) + self.skip(x))


class Bottlenecks(nn.Module):
    """ResNet-50 of half the width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, blocks, inner = nn.Conv2d(3, 32, 7, 2, 3), [], 32
        for level, count in enumerate((3, 4, 6, 3)):
            width = 32 << level
            for index in range(count):
                stride = 2 if level and not index else 1
                blocks.append(Bottleneck(inner, 4 * width, width, stride))
                inner = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inner, 100)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, 3, height, width]."""
        x = nn.functional.max_pool2d(self.stem(x), 2)
        return self.head(self.blocks(x).mean((2, 3)))


class Patches(nn.Module):
    """A transformer over patches of 8 by 8 pixels."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed, self.body = nn.Conv2d(3, 192, 8, 8), body
        self.place, self.head = nn.Parameter(torch.zeros(144, 192)), nn.Linear(192, 100)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, 3, 96, 96]."""
        x = self.embed(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.body(x).mean(1))


class UNet(nn.Module):
    """Three levels with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def level(inner: int, outer: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inner, outer, 3, 1, 1),
                nn.GroupNorm(4, outer),
                nn.SiLU(),
                nn.Conv2d(outer, outer, 3, 1, 1),
                nn.GroupNorm(4, outer),
                nn.SiLU(),
            )

        sizes = [width << i for i in range(4)]
        self.down = nn.ModuleList(level(a, b) for a, b in itertools.pairwise([3, *sizes]))
        self.up = nn.ModuleList(level(3 * a, a) for a in sizes[-2::-1])
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, 3, height, width]."""
        skips = []
        for index, level in enumerate(self.down):
            x = level(nn.functional.max_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for level in self.up:
            wide = nn.functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([wide, skips.pop()], 1))
        return self.out(x)


class Recurrent(nn.Module):
    """Words, four LSTMs one after another, words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4000, 128), nn.Linear(128, 4000)
        self.layers = nn.ModuleList(nn.LSTM(128, 128, batch_first=True) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        """``words`` of shape [rows, length]."""
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class Part:
    """A stage of a program with what it receives, made by running what is before it."""

    def __init__(
        self, program: Program, low: int, high: int, carried: tuple[Tensor, ...], leaves: list[Any]
    ) -> None:
        self._function, self._leaves = StageFunction(program, low, high), leaves
        metas = [program.values[value] for value in (program.live[low] if low else [])]
        self._carried = tuple(
            x.detach().requires_grad_(meta.requires_grad)
            for x, meta in zip(carried, metas, strict=True)
        )
        self.times: list[float] = []
        self._grads: dict[int, Tensor] = {}

    def run(self) -> tuple[Any, ...]:
        """Forward and backward, timed; gives what the next part receives."""
        # As for all microbatches but the first of a batch: weights have gradients to add to.
        for x in self._carried:
            x.grad = None
        start = time.thread_time()
        out = self._function(self._carried, self._leaves)
        forward = time.thread_time() - start
        # What only passes through has no work, and gradients come from the next stage.
        passed = set(map(id, self._carried))
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        found = [x for x in tensors if x.requires_grad and id(x) not in passed]
        for index, x in enumerate(found):
            self._grads.setdefault(index, torch.ones_like(x))
        start = time.thread_time()
        if found:
            torch.autograd.backward(found, list(self._grads.values()))
        self.times.append(forward + time.thread_time() - start)
        return out if isinstance(out, tuple) else (out,)

    @property
    def seconds(self) -> float:
        """Least time of a run."""
        return min(self.times)


def parts_of(program: Program, bounds: list[int], leaves: list[Any]) -> list[Part]:
    """All parts between ``bounds``, each run once."""
    parts, carried = [], ()
    for low, high in itertools.pairwise(bounds):
        parts.append(Part(program, low, high, carried, leaves))
        carried = parts[-1].run()
        parts[-1].times.clear()
    return parts


def measure(call: Call, num_stages: int, repeats: int) -> dict[str, Any]:
    """Largest stage over the mean for each way to cut, and the predictions."""
    module, args, kwargs = call
    program = record(module, args, kwargs, num_stages=num_stages)
    leaves = pytree.tree_leaves((args, kwargs))
    ends = program.num_pieces
    legal = [p for p in range(ends + 1) if program.legal[p] or p in (0, ends)]
    units = parts_of(program, legal, leaves)
    for _ in range(repeats):
        for unit in units:
            unit.run()
    measured, starts = np.zeros(ends), dict(zip(legal, units, strict=False))
    for at, unit in starts.items():
        measured[at] = unit.seconds
    even = {"seconds_per_byte": SECONDS_PER_BYTE}
    free = {"seconds_per_byte": 0.0}
    shape = program.legal, program.bytes_at, num_stages
    ways = {
        "auto": partition(program.cost, *shape, **even),
        "uniform": partition_uniform(
            program.piece_names, program.legal, num_stages, repeated_blocks(module)
        ),
        "best": partition(measured, *shape, **free),
    }
    bounds = {way: [0, *cuts, ends] for way, cuts in ways.items()}
    stages = {}
    for way, cuts in bounds.items():
        full = list(dict.fromkeys(cuts))  # an empty stage costs nothing
        stages[way] = parts_of(program, full, leaves)
    for _ in range(repeats):
        for parts in stages.values():
            for part in parts:
                part.run()
    largest = {way: max(part.seconds for part in parts) for way, parts in stages.items()}
    mean = sum(part.seconds for part in stages["auto"]) / num_stages
    predicted = [float(program.cost[a:b].sum()) for a, b in itertools.pairwise(bounds["auto"])]
    return {
        "stages": num_stages,
        "cuts": ways,
        "predicted": max(predicted) * num_stages / sum(predicted),
        **{way: seconds / mean for way, seconds in largest.items()},
        "above_best": largest["auto"] / largest["best"] - 1,
        "by_pieces": {
            way: max(measured[a:b].sum() for a, b in itertools.pairwise(cuts))
            * num_stages
            / measured.sum()
            for way, cuts in bounds.items()
        },
    }


def main() -> None:
    """Prints a row for each model and number of stages, and a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", default=",".join(MODELS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print("| model | stages | predicted | auto | uniform | best cut | auto above best |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for name in asked.models.split(","):
        torch.manual_seed(0)
        call = MODELS[name]()
        for num_stages in (2, 4):
            row = {"model": name, **measure(call, num_stages, asked.repeats)}
            found.append(row)
            numbers = [f"{row[key]:.2f}" for key in ("predicted", "auto", "uniform", "best")]
            above = f"{100 * row['above_best']:+.0f} %"
            print("| " + " | ".join([name, str(num_stages), *numbers, above]) + " |", flush=True)
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
