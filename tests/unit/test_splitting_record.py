"""Recordings: what they hold, what they leave alone, and when they are out of date."""

from __future__ import annotations

import copy
import gc
import itertools
import linecache
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_pipeline.splitting import (
    CPU_RATES,
    Program,
    StageFunction,
    ValueRef,
    canonical_names,
    record,
    state_items,
)
from tests.models.zoo import WIDTH, ZOO, Chain


def sequence(**options: Any) -> Tensor:
    return torch.randn(2, 4, WIDTH, **options)


def test_program_of_a_chain() -> None:
    model = Chain(2)
    program = record(model, (sequence(),), {}, num_stages=2)
    assert program.piece_names == ["layers.0", "", "layers.1", ""]
    assert program.num_pieces == 4 and program.legal.tolist() == [True] * 5
    assert program.reads[0] == {"layers.0.weight", "layers.0.bias"}
    assert program.writes == [frozenset()] * 4
    assert program.live[0] == [] and [len(alive) for alive in program.live[1:]] == [1] * 4
    assert program.bytes_at.tolist() == [0, *[2 * 4 * WIDTH * 4] * 4]
    value = program.values[program.live[2][0]]
    assert (value.shape, value.dtype, value.requires_grad) == ((2, 4, WIDTH), torch.float32, True)
    assert isinstance(program.output_metas[0], ValueRef)
    assert program.leaves == {"layers.0", "layers.1"}


def test_cost_is_a_sum_of_rates_and_counts_the_gradients_that_are_computed() -> None:
    model, rows = Chain(2), 8
    x = torch.randn(rows, WIDTH)
    trained = record(model, (x,), {}, num_stages=2)
    with torch.no_grad():
        evaluated = record(model, (x,), {}, num_stages=2)
    flops = 2 * rows * WIDTH * WIDTH
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    nbytes = 4 * 2 * rows * WIDTH + weights
    product = flops / CPU_RATES.flops + CPU_RATES.launch
    moved = nbytes / CPU_RATES.bytes
    added = 3 * weights / CPU_RATES.bytes  # to the gradients of other microbatches
    assert evaluated.cost[0] == pytest.approx(product + moved)
    # the first layer's input needs no gradient
    assert trained.cost[0] == pytest.approx(2 * product + 2 * moved + added)
    assert trained.cost[2] == pytest.approx(3 * product + 2 * moved + added)


def test_cost_knows_what_is_slow_on_a_cpu() -> None:
    x = torch.randn(2, 3, 16, 16)
    pooled = record(nn.MaxPool2d(4), (x,), {}, num_stages=1)
    dropped = record(nn.Dropout(), (x,), {}, num_stages=1)
    assert pooled.nodes[0].work.elements == dropped.nodes[0].work.elements == x.numel()
    table = record(nn.Embedding(1000, 8), (torch.arange(4),), {}, num_stages=1)
    assert table.nodes[0].work.bytes == 2 * 4 * 8 * 4 + 4 * 8  # four rows and their numbers


@pytest.mark.parametrize("name", ["GPT", "LSTMs", "Experts", "BufferWrites", "CollectedByHooks"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_recording_leaves_no_trace(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    model = ZOO[name].make()
    arguments = ZOO[name].inputs(2, 6)
    tensors = [(id(t), t._version, t.clone()) for *_, t in state_items(model)]
    attributes = [dict(child.__dict__) for child in model.modules()]
    generator = torch.get_rng_state()
    with mode():
        record(model, *arguments, num_stages=4)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [(id(t), t._version) for *_, t in state_items(model)] == [t[:2] for t in tensors]
    assert all(
        torch.equal(t, old[2]) for (*_, t), old in zip(state_items(model), tensors, strict=True)
    )
    assert all(
        child.__dict__ == old for child, old in zip(model.modules(), attributes, strict=True)
    )


@pytest.mark.parametrize("name", ["ViT", "ResNet", "Experts", "LSTMs"])
def test_meta_weights_give_the_same_program(name: str) -> None:
    model, arguments = ZOO[name].make(), ZOO[name].inputs(2, 16)
    program = record(model, *arguments, num_stages=3)
    meta = record(copy.deepcopy(model).to("meta"), *arguments, num_stages=3)
    assert meta.piece_names == program.piece_names
    assert meta.live == program.live and meta.reads == program.reads
    assert meta.cost.tolist() == pytest.approx(program.cost.tolist())


def test_stages_under_inference_mode() -> None:
    model, x = Chain().eval(), sequence()
    with torch.inference_mode():
        program = record(model, (x,), {}, num_stages=2)
        carried = StageFunction(program, 0, 4)((), [x])
        out = StageFunction(program, 4, program.num_pieces)(carried, [x])
        torch.testing.assert_close(out, model(x), rtol=0, atol=0)


def test_forward_replaces_a_patched_one() -> None:
    model, x = Chain(3), sequence()
    original = model.forward
    model.forward = lambda *args: pytest.fail("the patched forward ran")  # type: ignore[method-assign]
    program = record(model, (x,), {}, forward=original, num_stages=2)
    assert program.piece_names[0] == "layers.0"


def test_leaves_of_an_earlier_recording_give_the_same_pieces() -> None:
    model = ZOO["GPT"].make()
    fine = record(model, *ZOO["GPT"].inputs(2, 6), num_stages=16)
    again = record(model, *ZOO["GPT"].inputs(3, 8), num_stages=1, leaves=fine.leaves)
    assert again.piece_names == fine.piece_names


class Embedding(nn.Module):
    """Labels, masks and positions are made again on each stage rather than sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1])[None] < lengths[:, None]) * self.scale
        for layer in self.layers:
            x = layer(x) * mask[..., None]
        return x


def test_values_of_inputs_are_local_and_their_buffers_are_read_where_they_are_used() -> None:
    model, x = Embedding(), sequence(requires_grad=True)
    arguments = (x, torch.tensor([2, 4]))
    program = record(model, arguments, {}, num_stages=4)
    assert [len(alive) for alive in program.live] == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1][
        : program.num_pieces + 1
    ]
    uses = [p for p, names in enumerate(program.reads) if "scale" in names]
    assert len(uses) == 3
    parts = [StageFunction(program, p, p + 1) for p in range(program.num_pieces)]
    assert [bool(part.positions) for part in parts] == [
        p == 0 or p in uses for p in range(program.num_pieces)
    ]
    carried: Any = ()
    for part in parts:
        carried = part(carried, list(arguments))
    torch.testing.assert_close(carried, model(*arguments), rtol=0, atol=0)


def test_a_part_without_pieces_passes_on() -> None:
    model, x = Chain(2), sequence()
    program = record(model, (x,), {}, num_stages=2)
    end = program.num_pieces
    (carried,) = StageFunction(program, 0, 2)((), [x])
    assert StageFunction(program, 0, 0)((), [x]) == ()
    assert StageFunction(program, 2, 2)((carried,), [x])[0] is carried
    assert StageFunction(program, end, end)((carried,), [x]) is carried


class Idle(Chain):
    def __init__(self) -> None:
        super().__init__(2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](self.drop(x)) + x


def test_a_call_that_does_nothing_now_is_not_skipped() -> None:
    program = record(Idle().eval(), (sequence(),), {}, num_stages=2)
    first, drop, second, total = program.nodes
    assert [node.name for node in program.nodes] == ["layers.0", "drop", "layers.1", ""]
    assert drop.operands == [first.outputs[0][1]]
    assert second.operands == [drop.outputs[0][1]]
    assert total.operands == [second.outputs[0][1], first.outputs[0][1]]


def test_hooks_of_containers_run_once_in_each_call() -> None:
    model, x, seen = ZOO["ViT"].make(), torch.randn(2, 3, 16, 16), []
    model.blocks[1].register_forward_hook(lambda *_: seen.append("after"))
    model.blocks[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    program = record(model, (x,), {}, num_stages=8)
    assert {"blocks.1", "blocks.2"} <= set(program.piece_names)
    seen.clear()
    carried = StageFunction(program, 0, program.num_pieces - 1)((), [x])
    StageFunction(program, program.num_pieces - 1, program.num_pieces)(
        carried, [x]
    ).sum().backward()
    assert seen == ["after", "backward"]


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(WIDTH, WIDTH)
        self.constant = torch.ones(3)

    def forward(self, x: Tensor) -> Any:
        return {
            "input": x,
            "parameter": self.linear.weight,
            "constant": self.constant,
            "nothing": None,
            "several": [x, self.linear(x), {"n": x.shape[0]}],
        }[self.what]


@pytest.mark.parametrize("what", ["input", "parameter", "constant", "nothing", "several"])
def test_unusual_outputs(what: str) -> None:
    model, x = Returns(what), sequence()
    program = record(model, (x,), {}, num_stages=2)
    assert program.legal.shape == (program.num_pieces + 1,)
    out = StageFunction(program, 0, program.num_pieces)((), [x])
    expected = model(x)
    assert pytree.tree_structure(out) == pytree.tree_structure(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(out, expected)


def program_with_settings() -> tuple[nn.Module, Program]:
    class Tempered(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.temperature, self.name, self.drop = 0.5, "a", nn.Dropout(0.0)
            self.limit, self.unread = float("nan"), 1

        def forward(self, x: Tensor) -> Tensor:
            assert self.name != "" and self.limit != 1
            return self.drop(super().forward(x)) / self.temperature

    model = Tempered()
    return model, record(model, (sequence(),), {}, num_stages=8)


@pytest.mark.parametrize(
    ("module", "attribute", "value", "changed"),
    [
        ("", "temperature", 0.7, True),
        ("", "temperature", 0.5, False),
        ("", "name", "b", True),
        ("", "unread", 2, False),
        ("", "training", False, False),
        ("drop", "p", 0.5, False),
        ("layers.0", "in_features", 3, False),
    ],
)
def test_changed_settings(module: str, attribute: str, value: object, changed: bool) -> None:
    """Leaves run natively, so that only what opened modules read is burnt in."""
    model, program = program_with_settings()
    then = getattr(model.get_submodule(module), attribute)
    setattr(model.get_submodule(module), attribute, value)
    expected = [(module, attribute, then, value)] if changed else []
    assert program.changed_settings() == expected


def test_source_is_readable_and_shown_in_tracebacks() -> None:
    model, x = Chain(2), sequence()
    part = StageFunction(record(model, (x,), {}, num_stages=2), 0, 2)
    lines = part.source.splitlines()
    assert lines[0] == "def stage(carried, inputs):"
    assert (
        "# layers.0, registry.py:" in part.source
        and "# relu in forward, registry.py:" in part.source
    )
    with pytest.raises(RuntimeError) as caught:
        part((), [torch.randn(2, 3)])
    shown = "".join(traceback.format_exception(caught.value))
    assert "# layers.0, registry.py:" in shown


def test_source_is_forgotten_with_its_function() -> None:
    part = StageFunction(record(Chain(2), (sequence(),), {}, num_stages=2), 1, 3)
    file = part.function.__code__.co_filename
    assert linecache.cache[file][2] == part.source.splitlines(True)
    del part
    assert file not in linecache.cache


class Ambient(nn.Module):
    """Settings that the module changes for some of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            frozen = self.layers[0](x)
            frozen.add_(1)
        x = self.layers[1](x) + frozen.clone()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            x = F.scaled_dot_product_attention(x, x, x)
        torch.set_default_dtype(torch.float64)
        try:
            ones = torch.ones(3)
        finally:
            torch.set_default_dtype(torch.float32)
        return self.layers[2](x), ones


def test_ambient_settings_are_repeated() -> None:
    model, x = Ambient(), sequence()
    program = record(model, (x,), {}, num_stages=4)
    carried: Any = ()
    bounds = [p for p in range(program.num_pieces + 1) if program.legal[p]]
    for low, high in itertools.pairwise(bounds):
        carried = StageFunction(program, low, high)(carried, [x])
    for found, expected in zip(carried, model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.get_default_dtype() is torch.float32


def test_kernels_of_attention_stay_on_the_recorded_choice() -> None:
    program = record(Ambient(), (sequence(),), {}, num_stages=4)
    ambient = {name for node in program.nodes for name, _ in node.ambient}
    assert {"attention_kernels", "default_dtype", "inference"} <= ambient


def test_state_items_and_canonical_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    model[1].weight = model[0].weight
    names = [item.name for item in state_items(model)]
    assert names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"] and "2.running_mean" in names
    assert canonical_names(model)["1.weight"] == "0.weight"
    assert all(item.entries[item.key] is item.tensor for item in state_items(model))


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was(enabled: bool) -> None:
    before, seen = gc.isenabled(), []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(gc.isenabled())
            return super().forward(x)

    (gc.enable if enabled else gc.disable)()
    try:
        record(nn.Sequential(Looks(2, 2)), (torch.zeros(1, 2),), {}, num_stages=1)
        assert gc.isenabled() == enabled and not any(seen)
    finally:
        (gc.enable if before else gc.disable)()
