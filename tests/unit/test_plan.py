"""The plan of a run as a value, as text and as a table."""

from __future__ import annotations

import dataclasses
import io
import random
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from lightning_pipeline.mesh import MeshSizes
from lightning_pipeline.names import (
    common_prefix,
    condense_names,
    cut_places,
    partition_names,
    stage_modules,
)
from lightning_pipeline.plan import Plan, make_plan
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.splitting import cuts_at


def plan_of(name: str, sizes: MeshSizes, microbatches: int, costs: list[float]) -> Plan:
    count = len(costs)
    return make_plan(
        get_schedule(name),
        sizes,
        microbatches,
        costs=costs,
        modules=[[f"net.blocks.{2 * i}", f"net.blocks.{2 * i + 1}"] for i in range(count)],
        parameters=[1_280_000 * (i + 1) for i in range(count)],
        bytes=[5_120_000 * (i + 1) for i in range(count)],
        notes=["`net.head` shares its weight with `net.stem`."],
        partition=[f"net.blocks.{2 * i}" for i in range(1, count)],
    )


@pytest.mark.parametrize(
    ("name", "sizes", "m", "bubble", "ranks", "in_flight"),
    [
        ("gpipe", MeshSizes(2, 1), 4, 1 / 5, [(1,), (0,)], [4, 4]),
        ("1f1b", MeshSizes(4, 2), 8, 3 / 11, [(6, 7), (4, 5), (2, 3), (0, 1)], [4, 3, 2, 1]),
        ("looped_bfs", MeshSizes(2, 1), 8, 1 / 17, [(1,), (0,), (1,), (0,)], [8, 8, 8, 8]),
        ("zbv_zero_bubble", MeshSizes(2, 1), 8, 1 / 49, [(0,), (1,), (1,), (0,)], [4, 3, 2, 1]),
        ("interleaved_1f1b", MeshSizes(1, 2), 3, 0, [(0, 1), (0, 1)], [2, 1]),
    ],
)
def test_plan(
    name: str,
    sizes: MeshSizes,
    m: int,
    bubble: float,
    ranks: list[tuple[int, ...]],
    in_flight: list[int],
) -> None:
    count = len(ranks)
    plan = plan_of(name, sizes, m, [0.6] * count)
    assert plan.schedule == get_schedule(name).name
    assert (plan.num_stages, plan.ranks, plan.replicas) == (count, *sizes)
    assert plan.microbatches == m
    assert plan.bubble == pytest.approx(bubble, abs=1e-12)
    assert [stage.rank for stage in plan.stages] == ranks
    assert [stage.in_flight for stage in plan.stages] == in_flight
    assert [stage.share for stage in plan.stages] == pytest.approx([1 / count] * count)
    assert [stage.index for stage in plan.stages] == list(range(count))
    assert plan.stages[1].modules == ("net.blocks.2", "net.blocks.3")
    assert plan.stages[1].parameters == 2_560_000 and plan.stages[1].bytes == 10_240_000


def test_unequal_costs_raise_the_bubble() -> None:
    plan = plan_of("1f1b", MeshSizes(2, 1), 10, [3.0, 6.0])
    assert [stage.share for stage in plan.stages] == pytest.approx([1 / 3, 2 / 3])
    assert plan.bubble == pytest.approx(1 - 90 / (2 * 63))


def test_stages_without_cost_are_planned() -> None:
    plan = plan_of("gpipe", MeshSizes(2, 1), 4, [0.0, 0.0])
    assert plan.bubble == 0.0 and [stage.share for stage in plan.stages] == [0.0, 0.0]


def test_illegal_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="Set num_microbatches=4"):
        plan_of("1f1b", MeshSizes(4, 1), 3, [1.0] * 4)


def test_text() -> None:
    assert str(plan_of("1f1b", MeshSizes(2, 2), 8, [1.0, 3.0])).splitlines() == [
        "1F1B: 2 stages on 2 ranks, 2 replicas, 8 microbatches a step, predicted bubble 36.0 %",
        "modules below net",
        "stage  rank  modules     parameters     size    cost  in flight",
        "    0  2, 3  blocks.0-1      1.28 M  5.12 MB  25.0 %          2",
        "    1  0, 1  blocks.2-3      2.56 M  10.2 MB  75.0 %          1",
        'partition=["net.blocks.2"]',
        "- `net.head` shares its weight with `net.stem`.",
    ]


def long_plan() -> Plan:
    block = "model.base_model.model.layers"
    pieces = [
        [f"{block}.{i}.{part}" for i in layers for part in ("input_layernorm", "self_attn.q_proj")]
        for layers in ((0, 2, 4, 6), (8, 10))
    ]
    pieces[1].insert(0, f"{block}.6")
    return make_plan(
        get_schedule("1f1b"),
        MeshSizes(2, 1),
        2,
        costs=[1.0, 1.0],
        modules=stage_modules(pieces),
        parameters=[1, 1],
        bytes=[4, 4],
        partition=partition_names(pieces),
        cuts=cut_places(pieces),
    )


def test_long_names_are_wrapped_at_commas() -> None:
    long = [f"long_name_of_a_module_{letter}" for letter in "abcd"]
    plan = dataclasses.replace(
        long_plan(), stages=(dataclasses.replace(long_plan().stages[0], modules=tuple(long)),)
    )
    first, more = str(plan).splitlines()[2:4]
    assert first.split()[:5] == ["0", "1", f"{long[0]},", f"{long[1]},", "1"]
    assert more.split() == [f"{long[2]},", long[3]]
    assert more.index(long[2]) == first.index(long[0])


def test_names_below_one_module_are_short() -> None:
    lines = [" ".join(line.split()) for line in str(long_plan()).splitlines()]
    assert lines[1:] == [
        "modules below model.base_model.model",
        "stage rank modules parameters size cost in flight",
        "0 1 layers.0, layers.2, layers.4, layers.6.{input_layernorm, 1 4 B 50.0 % 2",
        "self_attn}",
        "1 0 layers.6 (own code), layers.8, layers.10 1 4 B 50.0 % 1",
        "cut at model.base_model.model.layers.6.self_attn.q_proj | "
        "... model.base_model.model.layers.8.input_layernorm",
    ]


def test_a_narrow_table_keeps_its_names() -> None:
    console = Console(file=io.StringIO(), width=70)
    console.print(long_plan())
    text = console.file.getvalue()
    assert "\u2026" not in text
    cells = [line.split("\u2502")[3].strip() for line in text.splitlines() if "\u2502" in line]
    found = "".join(cells).replace(",", "").replace(" ", "")
    assert "layers.6.{input_layernormself_attn}" in found and "layers.10" in found


def test_what_is_new_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = long_plan()
    other = dataclasses.replace(plan, microbatches=4, bubble=0.5)
    noted = dataclasses.replace(plan, notes=("A note.",))
    moved = dataclasses.replace(plan, stages=plan.stages[::-1])
    assert plan.adds_to(None) and noted.adds_to(plan) and moved.adds_to(plan)
    assert not other.adds_to(plan) and not plan.adds_to(noted)
    noted.print()
    assert capsys.readouterr().out == f"{noted}\n"


def test_rich_shows_the_same_cells() -> None:
    plan = make_plan(
        get_schedule("gpipe"),
        MeshSizes(1, 1),
        1,
        costs=[1.0],
        modules=[["experts[red]"]],
        parameters=[999],
        bytes=[3_996],
        notes=["A note with [red] brackets."],
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(plan)
    text = console.file.getvalue()
    for cell in ("experts[red]", "999", "4 kB", "100.0 %", "GPipe: 1 stage on 1 rank, 1 replica, "):
        assert cell in text, text
    assert "- A note with [red] brackets." in text


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "-"),
        ([""], "(whole module)"),
        (["model.stem"], "model.stem"),
        (["m.blocks.0", "m.blocks.1", "m.blocks.2", "m.norm"], "m.blocks.0-2, m.norm"),
        (["m.9", "m.10", "m.12"], "m.9-10, m.12"),
        (["m.2", "m.1"], "m.2, m.1"),
        (["0", "1", "2"], "0-2"),
        (["m.0.a", "m.0.b", "m.1.a", "m.1.b"], "m.0-1.{a, b}"),
        (["m.0.a", "m.0.b", "m.1.a"], "m.0.{a, b}, m.1.a"),
        (["m.0.a.0", "m.0.a.1", "m.1.a.0", "m.1.a.1"], "m.0-1.a.0-1"),
        (["enc.0", "enc.1", "dec.0"], "enc.0-1, dec.0"),
        (["m", "m.0"], "m, m.0"),
    ],
)
def test_names_are_condensed(names: list[str], expected: str) -> None:
    assert condense_names(names) == expected


@pytest.mark.parametrize(
    ("parameters", "bytes", "cells"),
    [
        (0, 0, "0  0 B"),
        (999, 1000, "999  1 kB"),
        (999_600, 1, "1 M  1 B"),
        (7_000_000_000, 28 * 10**12, "7 G  28 TB"),
    ],
)
def test_sizes_are_readable(parameters: int, bytes: int, cells: str) -> None:
    plan = make_plan(
        get_schedule("gpipe"), MeshSizes(1, 1), 1, [1.0], [["net"]], [parameters], [bytes]
    )
    row = " ".join(str(plan).splitlines()[2].split())
    assert f"net {' '.join(cells.split())} 100.0 %" in row


def test_stage_modules_names_whole_modules():
    pieces = [
        ["stem", "blocks.0.conv", "blocks.0", "blocks.1.conv", "blocks.1"],
        ["blocks.1.norm", "blocks.1", "blocks.2.conv", "blocks.2.norm", "", "head"],
        [],
    ]
    assert stage_modules(pieces) == [
        ["stem", "blocks.0", "blocks.1.conv"],
        ["blocks.1.norm", "blocks.2", "head"],
        [],
    ]
    assert stage_modules([[""], ["a"]]) == [[""], ["a"]]


@pytest.mark.parametrize(
    ("pieces", "partition", "cuts"),
    [
        ([["stem", "n.0.a", "n.0"], ["n.1.a", "n.1"]], ("n.1",), ("n.0.a ... | n.1.a",)),
        ([["n.0.a"], ["n.0", "n.0.b"]], None, ("n.0.a | ... n.0.b",)),
        ([["n.a", "n"], ["n"], ["n", "n.b"]], None, ("n.a ... | ... n.b",) * 2),
        ([["n.0.a"], ["n.0.b"], ["", "h"]], None, ("n.0.a | n.0.b", "n.0.b | ... h")),
        ([["e"], ["e", "h"]], None, ("e | e",)),  # a module that is called twice
        ([["e"], [], ["h"]], None, ("e | h", "e | h")),
        ([["n.0", "n.0.a"], ["n.1", "n.1.a"]], ("n.1",), ("n.0.a | ... n.1.a",)),
        ([[], ["", "h"], ["", ""]], None, ("| ... h", "h | ...")),
    ],
)
def test_cuts_are_named(pieces, partition, cuts):
    assert partition_names(pieces) == partition
    assert cut_places(pieces) == cuts


def test_a_stage_of_own_code_says_so():
    pieces = [["n.0.qkv"], ["n.0", "n.0"], ["n.0.out", "n.1"], ["n.1"]]
    assert stage_modules(pieces) == [["n.0.qkv"], ["n.0 (own code)"], ["n.0.out", "n.1"], ["n.1"]]


@pytest.mark.parametrize("seed", range(50))
def test_named_partitions_make_the_same_cut(seed):
    dice = random.Random(seed)
    names = [
        ".".join(str(dice.randrange(2)) for _ in range(dice.randrange(1, 4)))
        for _ in range(dice.randrange(3, 9))
    ]
    if seed % 2:
        names.sort()
    bounds = [0, *sorted(dice.sample(range(1, len(names)), 2)), len(names)]
    found = partition_names([names[a:b] for a, b in pairwise(bounds)])
    if found is not None:
        assert cuts_at(names, found, np.ones(len(names) + 1, bool), 3) == bounds[1:-1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        ([""], ""),
        (["a"], ""),
        (["a.b.c", "a.b.d"], "a.b"),
        (["a.b.0", "a.b.1"], "a"),
        (["a.0", "a.1"], ""),
        (["a.b", "a.b.c"], "a"),
        (["a.b", "c.b"], ""),
        (["a.0.b", "a.0.c"], "a.0"),
        (["a.b.3 (own code)", "a.b.4"], "a"),
    ],
)
def test_common_prefix(names, expected):
    assert common_prefix(names) == expected
