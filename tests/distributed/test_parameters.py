"""Parameters and buffers with a story, trained as on one device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.utilities import grad_norm

from tests.distributed.feeds import Several
from tests.distributed.fits import Run, Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.models import parameters, states

TABLES = {
    "tied": parameters.TIED,
    "frozen": parameters.FROZEN,
    "computed": states.COMPUTED,
    "odd": states.ODD,
    "lazy": states.LAZY,
}
LAYOUTS = {
    "1F1B": (2, {}),
    "InterleavedZeroBubble": (2, {"schedule": "InterleavedZeroBubble"}),
    "ZBVZeroBubble": (2, {"schedule": "ZBVZeroBubble"}),
    "3 ranks": (3, {}),
}


def scripts(table: dict[str, Any], **trainer: Any) -> Several:
    # Two epochs of two steps: some change what is trained in between.
    trainer = {"max_steps": 4, "limit_val_batches": 1, **trainer}
    return Several({n: Script(m, partial(vectors, 32), trainer=trainer) for n, m in table.items()})


@functools.cache
def on_one_device(group: str) -> dict[str, Run]:
    return scripts(TABLES[group]).plain()[0]


# Three ranks where ties and frozen weights lie otherwise, and no layout twice for the same reason.
RUNS = [
    *((group, layout) for group in ("tied", "frozen") for layout in LAYOUTS),
    *((group, layout) for group in ("computed", "odd") for layout in list(LAYOUTS)[:3]),
    *(("lazy", layout) for layout in ("1F1B", "ZBVZeroBubble")),
]


@pytest.mark.parametrize(("group", "layout"), RUNS)
def test_parameters_equal_one_device(group, layout):
    expected = on_one_device(group)
    ranks, arguments = LAYOUTS[layout]
    strategy = {"pipeline_parallel_size": ranks, "num_microbatches": 4, **arguments}
    for runs in run_ranks(ranks, scripts(TABLES[group]), strategy, ranks, deadline=120):
        for name, run in runs.items():
            assert distance(run, expected[name]) <= TOLERANCE, name
            assert run.metrics == pytest.approx(expected[name].metrics, rel=1e-12), name


@functools.cache
def accumulated() -> dict[str, Run]:
    """On one device, with the microbatches one after the other."""
    several = scripts(states.WRITTEN, accumulate_grad_batches=4, limit_val_batches=0)
    for script in several.scripts.values():
        script.batch_size = 4
    return several.plain()[0]


@pytest.mark.parametrize("layout", list(LAYOUTS)[:3])
def test_written_buffers_equal_accumulated_microbatches(layout):
    ranks, arguments = LAYOUTS[layout]
    strategy = {"pipeline_parallel_size": ranks, "num_microbatches": 4, **arguments}
    several = scripts(states.WRITTEN, limit_val_batches=0)
    for runs in run_ranks(ranks, several, strategy, ranks, deadline=120):
        for name, run in runs.items():
            assert distance(run, accumulated()[name]) <= TOLERANCE, name


def test_fillers_leave_no_trace_in_written_buffers():
    """A batch of one row is one microbatch; the schedule asks for more of them."""
    table = {n: m for n, m in states.WRITTEN.items() if n != "a lazy norm"}
    several = scripts(table, limit_val_batches=0)
    for script in several.scripts.values():
        script.batch_size = 1
    expected = several.plain()[0]
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    for runs in run_ranks(2, several, strategy, 2, deadline=120):
        for name, run in runs.items():
            assert distance(run, expected[name]) <= TOLERANCE, name


class UncalledLazy(states.Lazy):
    def __init__(self):
        super().__init__()
        self.forgotten = torch.nn.LazyLinear(3)


def test_lazy_module_that_no_step_calls_is_refused():
    script = Script(UncalledLazy, partial(vectors, 32))
    message = "'forgotten.weight' is lazy and training_step and validation_step did not call"
    with pytest.raises(RankFailed, match=f"{message}.*nn.Linear.*remove the module"):
        script.pipelined(2, deadline=30)


# ---- ties: one value everywhere, counted once, saved once


class Norms(Callback):
    """Norms of the gradients before and after they are clipped."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.norms.append({name: float(norm) for name, norm in grad_norm(module, 2).items()})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


class Holders(Callback):
    """What each rank holds of a tied weight at the end, before the module is whole again."""

    def on_train_end(self, trainer, module) -> None:
        held = [bits(p) if type(p) is torch.nn.Parameter else None for p in module.parameters()]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, held)
        copies = list(zip(*everywhere, strict=True))
        self.copies = [set(values) - {None} for values in copies]
        self.num_holders = [sum(v is not None for v in values) for values in copies]


def copies(trainer, module):
    holders = next(c for c in trainer.callbacks if isinstance(c, Holders))
    return holders.copies, holders.num_holders


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("model", [parameters.TiedThrice, parameters.TiedInside])
def test_tied_weights_stay_equal_to_the_bit(model, schedule):
    trainer = {"max_steps": 50, "limit_val_batches": 0, "gradient_clip_val": 0.1}
    script = Script(model, partial(vectors, 32), trainer={**trainer, "callbacks": [Holders()]})
    script.after = copies
    for run in script.pipelined(2, schedule=schedule, num_microbatches=4):
        found, num_holders = run.extra
        assert all(len(values) == 1 for values in found)
        assert max(num_holders) == 2


@dataclass
class Saving:
    """Trains with clipped gradients and loads the checkpoint; ``path`` is in a shared folder."""

    script: Script
    path: str

    def __call__(self, strategy: Any, devices: int) -> tuple[Run, Any, dict[str, Any]]:
        def after(trainer, module):
            trainer.save_checkpoint(self.path)
            return next(c for c in trainer.callbacks if isinstance(c, Norms)).norms

        self.script.after = after
        run = self.script(strategy, devices)
        return run, run.extra, torch.load(self.path, weights_only=False)


def shared_names(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of tensors of one storage."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(by_storage.values())


@pytest.mark.parametrize(
    "model",
    [parameters.TiedThrice, parameters.ModuleAtTwoNames, parameters.ParameterAtTwoNames],
)
def test_tied_weights_are_counted_and_saved_once(model, tmp_path):
    trainer = {"max_steps": 4, "limit_val_batches": 0, "gradient_clip_val": 0.05}
    script = Script(model, partial(vectors, 32), trainer={**trainer, "callbacks": [Norms()]})
    [(expected, norms, saved)] = run_ranks(1, Saving(script, f"{tmp_path}/one.ckpt"), "auto", 1)
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    saving = Saving(script, f"{tmp_path}/two.ckpt")
    for run, own_norms, own_saved in run_ranks(2, saving, strategy, 2):
        assert distance(run, expected) <= TOLERANCE
        for own, other in zip(own_norms, norms, strict=True):
            assert own == pytest.approx(other, rel=1e-12)
        assert list(own_saved["state_dict"]) == list(saved["state_dict"])
        assert shared_names(own_saved["state_dict"]) == shared_names(saved["state_dict"])
        [own_state], [state] = own_saved["optimizer_states"], saved["optimizer_states"]
        assert own_state["state"].keys() == state["state"].keys()
        for index, entry in state["state"].items():
            for key, value in entry.items():
                own = own_state["state"][index][key]
                torch.testing.assert_close(own, value, rtol=1e-9, atol=1e-15)


# ---- where the stages are


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_stages_without_parameters(schedule):
    """``NoWeights`` with a stage of its activations alone."""
    depth = 1 if schedule == "1F1B" else 2
    names = ("net.1", "net.5") if depth == 1 else ("net.1", "net.4", "net.5", "net.7", "net.9")
    expected = on_one_device("odd")["modules between the weights that have none"]
    script = Script(
        states.NoWeights,
        partial(vectors, 32),
        trainer={"max_steps": 4, "limit_val_batches": 1},
    )
    for run in script.pipelined(3, schedule=schedule, num_microbatches=6, partition=names):
        assert distance(run, expected) <= TOLERANCE


def rates(trainer, module):
    return {name: float(value) for name, value in trainer.logged_metrics.items()}


@pytest.mark.parametrize("layout", ["1F1B", "3 ranks"])
def test_learning_rates_of_groups_that_are_elsewhere(layout, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    trainer = {"max_steps": 4, "limit_val_batches": 0, "log_every_n_steps": 1}
    trainer["callbacks"] = [LearningRateMonitor("step", log_weight_decay=True)]
    trainer["logger"] = CSVLogger(tmp_path)
    script = Script(parameters.Groups, partial(vectors, 32), trainer=trainer, after=rates)
    expected = script.plain()
    ranks, arguments = LAYOUTS[layout]
    for run in script.pipelined(ranks, num_microbatches=4, **arguments):
        assert distance(run, expected) <= TOLERANCE
        assert run.extra == pytest.approx(expected.extra, rel=1e-12)


# ---- adapters of peft


class Adapted(parameters.Regression):
    """Low-rank adapters in a model of plain modules, with one module that is trained in full."""

    def __init__(self) -> None:
        import peft

        super().__init__()
        config = peft.LoraConfig(
            r=2,
            lora_alpha=8,
            init_lora_weights=False,
            target_modules=["0", "2", "6", "8"],
            modules_to_save=["10"],
        )
        self.net = peft.get_peft_model(self.net, config)


class AdaptedLlama(parameters.Words):
    """A small transformer of Hugging Face with adapters, saved by itself when the fit is over."""

    folder: Any = None

    def __init__(self) -> None:
        import peft
        import transformers

        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=parameters.TOKENS,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
        adapters = peft.LoraConfig(
            r=2, task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["lm_head"]
        )
        self.net, self.embed, self.head = peft.get_peft_model(model, adapters), None, None

    def forward(self, x):
        return self.net(input_ids=parameters.ids_of(x)).logits


def saved_adapters(trainer, module, folder=None):
    """What peft saves, and the weights that merging makes, when the module is whole again."""
    from safetensors.torch import load_file

    plan = getattr(trainer.strategy, "plan", None)
    shares = [] if plan is None else [stage.share for stage in plan.stages]
    own = folder / f"{plan is None}{trainer.global_rank}"
    module.net.save_pretrained(own)
    saved = load_file(own / "adapter_model.safetensors")
    return saved, module.net.merge_and_unload().state_dict(), shares


def adapted_script(model, folder):
    after = partial(saved_adapters, folder=folder)
    trainer = {"max_steps": 4, "limit_val_batches": 1}
    return Script(model, partial(vectors, 32), trainer=trainer, after=after)


@pytest.mark.parametrize("layout", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("model", [Adapted, AdaptedLlama])
def test_adapters_equal_one_device(model, layout, tmp_path):
    expected = adapted_script(model, tmp_path).plain()
    ranks, arguments = LAYOUTS[layout]
    assert any("lora_B" in name for name in expected.extra[0])
    for run in adapted_script(model, tmp_path).pipelined(ranks, num_microbatches=4, **arguments):
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)
        assert min(run.extra[2]) > 0.1  # it has been cut
        for found, wanted in zip(run.extra[:2], expected.extra[:2], strict=True):
            assert found.keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-11, atol=1e-12)
