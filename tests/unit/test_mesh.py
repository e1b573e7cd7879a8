"""Sizes, places and groups of the mesh, without a process."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_pipeline import mesh as mesh_module
from lightning_pipeline.mesh import Mesh, MeshSizes, resolve_sizes
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule


@pytest.mark.parametrize(
    ("world", "pipeline", "data", "expected"),
    [
        (1, "auto", "auto", (1, 1)),
        (8, "auto", "auto", (8, 1)),
        (8, "auto", 2, (4, 2)),
        (8, "auto", 8, (1, 8)),
        (8, 2, "auto", (2, 4)),
        (8, 8, "auto", (8, 1)),
        (6, 3, 2, (3, 2)),
        (1, 1, 1, (1, 1)),
    ],
)
def test_sizes(world: int, pipeline: int, data: int, expected: tuple[int, int]) -> None:
    assert resolve_sizes(world, pipeline, data) == expected


@pytest.mark.parametrize(
    ("world", "pipeline", "data", "parts"),
    [
        (
            8,
            3,
            "auto",
            [
                "pipeline_parallel_size must divide the number of processes, got 3 for 8",
                "devices x num_nodes = 8",
                "Set pipeline_parallel_size to 2 or 4",
            ],
        ),
        (6, "auto", 4, ["data_parallel_size must divide", "Set data_parallel_size to 3 or 6"]),
        (4, 16, "auto", ["got 16 for 4", "Set pipeline_parallel_size to 4."]),
        (
            8,
            2,
            2,
            [
                "pipeline_parallel_size x data_parallel_size must be the number of processes",
                "got 2 x 2 = 4 for 8",
                "Set data_parallel_size=4 or devices=4",
            ],
        ),
        (3, 2, 2, ["got 2 x 2 = 4 for 3", "Set devices=4 on one node"]),
        (8, 0, "auto", ["pipeline_parallel_size must be an integer of at least 1, got 0"]),
        (8, "auto", "all", ["data_parallel_size must be an integer of at least 1, got 'all'"]),
        (8, 2.0, "auto", ["got 2.0"]),
        (0, "auto", "auto", ["world_size must be an integer of at least 1, got 0"]),
    ],
)
def test_wrong_sizes(world: int, pipeline: int, data: int, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        resolve_sizes(world, pipeline, data)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    "sizes", [MeshSizes(1, 1), MeshSizes(1, 3), MeshSizes(4, 1), MeshSizes(4, 3)]
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_places(schedule: Schedule, sizes: MeshSizes) -> None:
    meshes = [Mesh(sizes, schedule, rank) for rank in range(sizes.pipeline * sizes.data)]
    for rank, mesh in enumerate(meshes):
        # The last stage of every replica is where its loggers look: the first ranks of the world.
        assert mesh.is_last == (rank < sizes.data)
        assert mesh.last_rank == mesh.data_rank == rank % sizes.data
        assert mesh.pipeline_ranks[mesh.pipeline_rank] == rank
        assert mesh.data_ranks[mesh.data_rank] == rank
        assert {meshes[r].data_rank for r in mesh.pipeline_ranks} == {mesh.data_rank}
        assert {meshes[r].stages for r in mesh.data_ranks} == {mesh.stages}
        held = sorted(stage for r in mesh.pipeline_ranks for stage in meshes[r].stages)
        assert held == list(range(mesh.num_stages))
        for r, member in enumerate(mesh.pipeline_ranks):
            v = mesh.stages_per_rank
            assert meshes[member].stages == schedule.stages_of_rank(r, sizes.pipeline, v)


@pytest.mark.parametrize(
    ("name", "rank", "pipeline_rank", "stages", "pipeline_ranks"),
    [
        ("1f1b", 0, 2, (2,), (4, 2, 0)),
        ("1f1b", 5, 0, (0,), (5, 3, 1)),
        ("interleaved_1f1b", 2, 1, (1, 4), (4, 2, 0)),
        ("zbv_zero_bubble", 0, 0, (0, 5), (0, 2, 4)),
        ("dualpipev", 5, 2, (2, 3), (1, 3, 5)),
    ],
)
def test_placement(
    name: str,
    rank: int,
    pipeline_rank: int,
    stages: tuple[int, ...],
    pipeline_ranks: tuple[int, ...],
) -> None:
    mesh = Mesh(MeshSizes(pipeline=3, data=2), get_schedule(name), rank)
    assert mesh.pipeline_rank == pipeline_rank
    assert mesh.stages == stages
    assert mesh.pipeline_ranks == pipeline_ranks


def test_more_stages_on_a_rank() -> None:
    mesh = Mesh(MeshSizes(2, 1), get_schedule("looped_bfs"), 0, stages_per_rank=3)
    assert (mesh.num_stages, mesh.stages) == (6, (1, 3, 5))
    with pytest.raises(ValueError, match="GPipe needs exactly 1"):
        Mesh(MeshSizes(2, 1), get_schedule("gpipe"), 0, stages_per_rank=3)


@pytest.mark.parametrize(
    ("name", "stages", "expected"),
    [
        ("1f1b", {0, 3}, [(6, 0), (7, 1)]),
        ("1f1b", {1}, [(4,), (5,)]),
        ("interleaved_1f1b", {0, 4}, [(6,), (7,)]),
        ("interleaved_1f1b", {0, 4, 7}, [(6, 0), (7, 1)]),
        ("zbv_zero_bubble", {0, 7}, [(0,), (1,)]),
        ("zbv_zero_bubble", {5, 0}, [(0, 4), (1, 5)]),
    ],
)
def test_holders(name: str, stages: set[int], expected: list[tuple[int, ...]]) -> None:
    mesh = Mesh(MeshSizes(pipeline=4, data=2), get_schedule(name), global_rank=3)
    assert [mesh.holder_ranks(frozenset(stages), d) for d in range(2)] == expected
    assert mesh.holder_ranks(frozenset(stages)) == expected[1]


@pytest.mark.parametrize("name", ["1f1b", "zbv_zero_bubble"])
def test_all_ranks_build_the_same_groups_in_the_same_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, ...]] = []

    def new_group(
        ranks: list[int], timeout: timedelta | None, backend: str, sort_ranks: bool
    ) -> object:
        assert timeout == timedelta(seconds=5) and not sort_ranks
        assert backend == "cpu:gloo,cuda:nccl"
        built.append(tuple(ranks))
        return tuple(ranks)

    monkeypatch.setattr(mesh_module.dist, "new_group", new_group)
    monkeypatch.setattr(mesh_module.dist, "get_backend_config", lambda: "cuda:nccl")
    sets = [frozenset({0, 1}), frozenset({0}), frozenset(range(4)), frozenset({1, 0})]
    calls = []
    for rank in range(8):
        mesh = Mesh(MeshSizes(pipeline=4, data=2), get_schedule(name), rank)
        mesh.build_groups(timeout=timedelta(seconds=5))
        assert mesh.pipeline_group == mesh.pipeline_ranks
        assert mesh.data_group == mesh.data_ranks
        groups = mesh.build_holder_groups(sets, timeout=timedelta(seconds=5))
        for stages, group in zip(sets, groups, strict=True):
            ranks = mesh.holder_ranks(stages)
            assert group == (ranks if rank in ranks and len(ranks) > 1 else None)
        calls.append(tuple(built))
        built.clear()
    assert len(set(calls)) == 1
    # Two pipelines, four positions, and the first set once in each pipeline: the others are
    # held by one rank, by the whole pipeline, or by the same ranks again.
    assert len(calls[0]) == len(set(calls[0])) == 2 + 4 + 2


@pytest.mark.parametrize(
    ("backend", "both"),
    [
        ("gloo", "gloo"),
        ("nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("xccl", "cpu:gloo,xpu:xccl"),
    ],
)
def test_groups_take_numbers_of_the_host(backend: str, both: str) -> None:
    assert mesh_module.with_host(backend) == both
