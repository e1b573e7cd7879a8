"""Modules that are built without memory for their weights: equal in every layout, wherever from."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.sharded import consolidate
from tests.distributed.fits import Script, classes
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE
from tests.models.modules import TransformerBlock

STEPS, BATCH = 4, 16

# Ranks of a pipeline, replicas, arguments of the strategy.
LAYOUTS = {
    "one": (1, 1, {"schedule": "GPipe"}),
    "pp2": (2, 1, {}),
    "pp4": (4, 1, {"schedule": "GPipe"}),
    "pp2xdp2": (2, 2, {}),
    "v": (2, 1, {"schedule": "ZBVZeroBubble"}),
}


class Decoder(nn.Module):
    """Initialises its weights in the ways that people do, has a tied weight and buffers."""

    def __init__(self, vocabulary=17, dim=16, depth=4):
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(8, dim) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(dim, 2) for _ in range(depth))
        self.gain = nn.Parameter(torch.empty(dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, dim), persistent=False)
        self.apply(self._init_weights)
        nn.init.ones_(self.gain)
        for number, block in enumerate(self.blocks):
            block.mlp[2].weight.data.mul_(0.5 / (number + 1))
            nn.init.orthogonal_(block.attention.proj.weight)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.token(tokens) + self.position + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.gain)


def plain_layers():
    """Modules that torch initialises by reset_parameters, and none besides."""
    layers = [m for _ in range(5) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())]
    return nn.Sequential(nn.Embedding(17, 16), nn.GRU(16, 16, batch_first=True), _First(), *layers,
                         nn.Linear(16, 17))  # fmt: skip


class _First(nn.Module):
    def forward(self, x):
        return x[0]


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": 17}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


class Bare(L.LightningModule):
    """Builds its model in ``configure_model``, as Lightning documents it for large models."""

    def __init__(self, make=Decoder):
        super().__init__()
        self.make, self.model, self.first = make, None, {}

    def configure_model(self):
        if self.model is None:
            self.model = self.make()

    def loss(self, batch):
        out = self.model(batch[0])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        if not self.first:
            self.first = held(self)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class OnMeta(Bare):
    """Is on meta before the Trainer sees it."""

    def __init__(self, make):
        super().__init__(make)
        with torch.device("meta"):
            self.model = make()


def held(module):
    """What this rank has of the state."""
    return {n: t.detach().clone() for n, t in module.state_dict().items() if not t.is_meta}


def tokens():
    data = [TensorDataset(classes(n, 8, top=17), classes(n, 8, top=17, seed=3)) for n in (64, 16)]
    return data[0], data[1]


class ReplicaScript(Script):
    """Every replica has every other row of the batch, and so the same batches in all layouts."""

    def loader(self, training):
        world = int(os.environ["WORLD_SIZE"])
        sampler = DistributedSampler(training, world, int(os.environ["RANK"]), shuffle=False)
        return DataLoader(training, self.batch_size, sampler=sampler)


def script(make=Decoder, kind=Bare, **changes):
    fields = {
        "batch_size": BATCH,
        "trainer": {"max_steps": STEPS, "limit_val_batches": 0},
        "after": lambda trainer, module: (module.first, held(module), module.training),
    }
    return ReplicaScript(functools.partial(kind, make), tokens, **{**fields, **changes})


def laid_out(run, layout, **arguments):
    """First and last state over all ranks of one layout; what two ranks hold must be equal."""
    ranks, replicas, strategy = LAYOUTS[layout]
    run = dataclasses.replace(run, batch_size=BATCH // replicas)
    first, last = {}, {}
    for rank in run.pipelined(ranks, replicas, **strategy, **arguments):
        for whole, part in ((first, rank.extra[0]), (last, rank.extra[1])):
            assert whole.keys() >= part.keys() or ranks > 1 or not whole
            for name, tensor in part.items():
                assert tensor.equal(whole.setdefault(name, tensor)), name
    return first, last


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (state[name].double() - tensor.double()).abs().max() if tensor.numel() else 0.0
        assert float(difference) <= TOLERANCE, name


@functools.cache
def one_rank(make, kind):
    """First and last state of one rank; plain Lightning goes the same way."""
    first, last = laid_out(script(make, kind), "one")
    assert_close(trained(make, first), last)
    return first, last


def trained(make, state, steps=STEPS, after=None):
    """The state that plain Lightning reaches on one device from ``state``."""

    def begin(module):
        module.configure_model()
        module.load_state_dict(state)

    trainer = {"max_steps": steps, "limit_val_batches": 0}
    return script(make, setup=begin, after=after, trainer=trainer).plain().state


@pytest.mark.parametrize(
    ("make", "kind", "layout"),
    [(Decoder, Bare, layout) for layout in ("pp2", "pp4", "pp2xdp2", "v")]
    + [(plain_layers, OnMeta, "pp2"), (llama, Bare, "v"), (llama, OnMeta, "pp2")],
)
def test_every_layout_begins_and_goes_on_alike(make, kind, layout):
    first, last = laid_out(script(make, kind), layout)
    expected_first, expected_last = one_rank(make, kind)
    assert first.keys() == expected_first.keys()
    for name, tensor in expected_first.items():
        assert first[name].equal(tensor), name
    assert_close(last, expected_last)


def saved(folder, source, tie):
    """A model as transformers saves it, in several files."""
    torch.manual_seed(3)
    model = llama(tie_word_embeddings=tie)
    if source == "folder":
        model.save_pretrained(folder, max_shard_size="4KB")
        assert len(list(Path(folder).glob("*.safetensors"))) > 1
        return folder
    if source == "file":
        model.save_pretrained(folder)
        return folder / "model.safetensors"
    torch.save({"state_dict": {f"model.{n}": t for n, t in model.state_dict().items()}},
               folder / "whole.ckpt")  # fmt: skip
    return folder / "whole.ckpt"


@pytest.mark.parametrize(
    ("source", "tie", "kind"),
    [("folder", True, Bare), ("file", False, OnMeta), ("checkpoint", True, Bare)],
)
def test_weights_are_read_from_files(tmp_path, source, tie, kind):
    from transformers import LlamaForCausalLM

    path = saved(tmp_path, source, tie)
    make = functools.partial(llama, tie_word_embeddings=tie)
    first, last = laid_out(script(make, kind), "pp2", weights=path)
    torch.manual_seed(3)
    whole = llama(tie_word_embeddings=tie) if source == "checkpoint" else None
    whole = whole or LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = {f"model.{n}": t.double() for n, t in whole.state_dict().items()}
    assert first.keys() == expected.keys()
    assert all(first[name].equal(tensor) for name, tensor in expected.items())
    assert_close(last, trained(make, expected))


def go_on(path, layout, folder=None, steps=2 * STEPS, **trainer):
    """Goes on from a checkpoint, or to one if there is a ``folder`` for it."""
    changes = {"max_steps": steps, "limit_val_batches": 0, **trainer}
    run = script(trainer=changes)
    run.after = lambda trainer, module: (
        trainer.save_checkpoint(folder) if folder else None,
        held(module),
    )
    run.checkpoint = path
    ranks, _, strategy = LAYOUTS[layout]
    arguments = {"save_distributed_checkpoint": folder is not None and folder.suffix == ""}
    state = {}
    for rank in run.pipelined(ranks, **strategy, **arguments):
        state |= rank.extra[1]
    return state


@pytest.mark.parametrize("name", ["file.ckpt", "folder"])
def test_going_on_from_a_checkpoint(tmp_path, name):
    """With the momenta of Adam, which wait for the placement too."""
    go_on(None, "pp2", tmp_path / name, STEPS)
    state = go_on(tmp_path / name, "v")
    plain = consolidate(tmp_path / name) if name == "folder" else tmp_path / name
    single = script(setup=Bare.configure_model, checkpoint=plain)
    single.trainer["max_steps"] = 2 * STEPS
    assert_close(state, single.plain().state)


def evaluated(path, strategy, ranks):
    """What one Trainer validates and predicts, from a checkpoint and on after it, and trains."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    if strategy is not None:
        strategy = PipelineStrategy(**strategy)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy or "auto", max_steps=2, **quiet
    )
    module = Predicts()
    data = [DataLoader(dataset, BATCH) for dataset in tokens()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predicted = torch.cat(trainer.predict(module, data[1], ckpt_path=path))
        [before] = trainer.validate(module, data[1], verbose=False)
        trainer.fit(module, *data)
        [after] = trainer.validate(module, data[1], verbose=False)
    elsewhere = any(t.is_meta for t in module.parameters())
    notes = [str(c.message) for c in caught if "still holds its part only" in str(c.message)]
    return predicted, [before["val_loss"], after["val_loss"]], elsewhere, len(notes)


class Predicts(Bare):
    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])


def test_runs_one_after_another_of_one_trainer(tmp_path):
    """They begin without a fit, and the module stays where it is in between."""
    path = tmp_path / "first.ckpt"
    first, _ = one_rank(Decoder, Bare)
    torch.save({"state_dict": first, "pytorch-lightning_version": L.__version__}, path)
    [(predicted, losses, _, _)] = run_ranks(1, evaluated, path, None, 1)
    for ranks, notes in ((1, 0), (2, 4)):  # the warning is on global rank 0
        found = run_ranks(ranks, evaluated, path, {}, ranks)
        assert found[0][3] == notes
        for rank in found:
            assert (rank[0] - predicted).abs().max() <= TOLERANCE
            assert rank[1] == pytest.approx(losses, rel=1e-12)
            assert rank[2] == (ranks > 1)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(16))

    def forward(self, x):
        return x * self.table


def with_a_table():
    return nn.Sequential(nn.Embedding(17, 16), Table(), nn.Linear(16, 17))


def asking():
    model = plain_layers()
    if model[-1].weight.norm() > 1:
        model.append(nn.Identity())
    return model


def lazy():
    return nn.Sequential(nn.Embedding(17, 16), nn.LazyLinear(17))


def more_tokens():
    return Decoder(vocabulary=19)


class UsesEarly(Bare):
    def on_train_start(self):
        self.model.gain.norm()


class SavesEarly(Bare):
    def on_train_start(self):
        self.trainer.save_checkpoint("never.ckpt")


# The module, arguments of the Trainer and of the strategy, and what the refusal says.
REFUSALS = {
    "no value": (OnMeta, with_a_table, {}, r"'model.1.table': Table \(.*test_materialising.py:\d+\)"
                 r" has no reset_parameters .* e.g. with torch.nn.init.normal_\(self.table\)"),
    "lazy": (Bare, lazy, {}, r"'model.1.weight' is lazy.*nn.Linear\(64, 10\)"),
    "never written": (Bare, with_a_table, {}, r"must get a value.*'model.1.table'"),
    "values": (Bare, asking, {}, r"'__bool__' asks for their values, at .*test_materialising.py:"
               r"\d+: if model\[-1\].weight.norm"),
    "average": (OnMeta, Decoder, {"callbacks": [EMAWeightAveraging()]},
                "EMAWeightAveraging copies the weights of OnMeta before the first batch, .*Build "
                "the module without"),
    "used early": (UsesEarly, Decoder, {}, "'norm' needs the parameter 'model.gain', which gets its"
                   " value with the first batch.*on_train_batch_end"),
    "saved early": (SavesEarly, Decoder, {}, "No checkpoint can be written to .*never.ckpt before "
                    "the first batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    kind, make, trainer, message = REFUSALS[name]
    run = script(make, kind, trainer={"max_steps": 1, "limit_val_batches": 0, **trainer})
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        run.pipelined(1, schedule="GPipe")


def test_processes_that_end_with_the_run_are_refused():
    strategy = PipelineStrategy(start_method="fork")
    strategy.connect(Bare())
    strategy._deferred = SimpleNamespace(check=lambda: None)
    strategy._mesh = SimpleNamespace(sizes=SimpleNamespace(pipeline=2))
    with pytest.raises(MisconfigurationException, match=r"'fork' end with it. Set start_method"):
        strategy._check_deferred()


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    first, _ = one_rank(Decoder, Bare)
    state = {"state_dict": first, "pytorch-lightning_version": L.__version__}
    torch.save(state, tmp_path / "first.ckpt")
    with pytest.raises(
        RankFailed, match=r"size mismatch for model.*\(17, 16\) there and \(19, 16\)"
    ):
        script(more_tokens, checkpoint=tmp_path / "first.ckpt").pipelined(1, schedule="GPipe")


def test_init_module_allocates_nothing_when_it_is_asked_to():
    """``Trainer.init_module(empty_init=True)`` builds outside of a run; others build for real."""
    for empty in (None, False, True):
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy())
        with trainer.init_module(empty_init=empty):
            module = Decoder()
        assert module.head.weight.is_meta == bool(empty)
        assert not module.shift.is_meta


@pytest.mark.slow
def test_a_rank_needs_little_more_than_its_share():
    from benchmarks.memory.weights import run

    for source in ("built", "safetensors", "ckpt"):
        for rank in run(160 * 10**6, 2, source):
            assert 70e6 < rank["share"] < 90e6
            assert rank["placed"] <= 1.15 * rank["share"]
