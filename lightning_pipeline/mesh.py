"""The two axes of the ranks: the pipeline outermost, the data-parallel replicas innermost.

With four ranks in a pipeline and two replicas, under a loop placement:

    global rank     0 1 | 2 3 | 4 5 | 6 7
    position         0  |  1  |  2  |  3
    replica         0 1 | 0 1 | 0 1 | 0 1
    pipeline rank    3  |  2  |  1  |  0      the last stage is on global rank 0

Replicas are neighbours because they exchange whole gradients, which wants the fastest links;
stages exchange activations only. Sizes are checked apart from groups, before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_pipeline import transfers
from lightning_pipeline.schedules import Auto, Schedule, require_count
from lightning_pipeline.threads import calm_gloo


class Scope(Enum):
    """Which ranks run the same line of the user's code at this moment."""

    ALL = "all ranks"
    """Hooks and callbacks."""
    REPLICAS = "the ranks that hold the same stages"
    """Steps: a stage runs its part of one."""
    ALONE = "this rank"
    """A step that is run for observation, of which other ranks may see another one."""


class MeshSizes(NamedTuple):
    """Extents of the axes.

    Attributes:
        pipeline: Number of ranks in one pipeline.
        data: Number of replicas of the pipeline.
    """

    pipeline: int
    data: int


def resolve_sizes(
    world_size: int,
    pipeline_parallel_size: int | Auto = "auto",
    data_parallel_size: int | Auto = "auto",
) -> MeshSizes:
    """Returns the extents of both axes.

    Example:
        >>> resolve_sizes(8, "auto", 2)
        MeshSizes(pipeline=4, data=2)

    Args:
        world_size: Number of processes: devices x nodes.
        pipeline_parallel_size: Ranks in one pipeline; ``"auto"`` is what the replicas leave.
        data_parallel_size: Replicas; ``"auto"`` is what the pipeline leaves, 1 if both are auto.

    Raises:
        ValueError: If the processes can't be arranged like that; names sizes that work.
    """
    require_count("world_size", world_size)
    asked: dict[str, int] = {}
    for name, value in (
        ("pipeline_parallel_size", pipeline_parallel_size),
        ("data_parallel_size", data_parallel_size),
    ):
        if value != "auto":
            require_count(name, value)
            asked[name] = value
    if len(asked) == 2 and math.prod(asked.values()) != world_size:
        pipeline, data = asked.values()
        quotient, rest = divmod(world_size, pipeline)
        fits = "" if rest else f"data_parallel_size={quotient} or "
        raise ValueError(
            "pipeline_parallel_size x data_parallel_size must be the number of processes, got "
            f"{pipeline} x {data} = {pipeline * data} for {world_size}. The processes come from "
            f"devices x num_nodes = {world_size}. Set {fits}devices={pipeline * data} on one node."
        )
    for name, value in asked.items():
        if world_size % value:
            raise ValueError(
                f"{name} must divide the number of processes, got {value} for {world_size}. "
                f"The processes come from devices x num_nodes = {world_size}. "
                f"Set {name} to {_nearest_divisors(world_size, value)}."
            )
    if len(asked) < 2:
        data = world_size // asked.get("pipeline_parallel_size", world_size)
        data = asked.get("data_parallel_size", data)
        return MeshSizes(world_size // data, data)
    return MeshSizes(asked["pipeline_parallel_size"], asked["data_parallel_size"])


def _nearest_divisors(number: int, value: int) -> str:
    divisors = [k for k in range(1, number + 1) if number % k == 0]
    low = max(k for k in divisors if k < value)
    return " or ".join(str(k) for k in [low, *[k for k in divisors if k > value][:1]])


def with_host(backend: str) -> str:
    """The backends of a group in which tensors of the host travel besides those of a device.

    Example:
        >>> with_host("nccl"), with_host("gloo")
        ('cpu:gloo,cuda:nccl', 'gloo')

    Args:
        backend: Name of a backend, or pairs of devices and backends, as torch takes them.
    """
    config = str(dist.BackendConfig(dist.Backend(backend)))
    devices = [pair.split(":")[0] for pair in config.split(",")]
    return backend if "cpu" in devices else f"cpu:gloo,{config}"


def control_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where numbers of the host travel in ``group``: there if they can, on ``device`` otherwise."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device


class Mesh:
    """Where one rank stands, and the process groups along its axes.

    Example:
        >>> mesh = Mesh(MeshSizes(pipeline=2, data=2), get_schedule("1F1B"), global_rank=1)
        >>> mesh.stages, mesh.is_last, mesh.pipeline_ranks, mesh.data_ranks
        ((1,), True, (3, 1), (0, 1))

    Args:
        sizes: Extents of both axes.
        schedule: The schedule, which places the stages.
        global_rank: This process' rank in the world.
        stages_per_rank: Stages that each rank holds; ``"auto"`` is 1 for single-stage schedules,
            2 otherwise.

    Attributes:
        num_stages: Number of stages of the model.
        pipeline_rank: Rank inside the pipeline, as torch numbers it: rank 0 holds stage 0.
        data_rank: Index of the replica.
        stages: Indices of the stages that this rank holds, in rising order.
        is_last: Whether this rank holds the last stage.
        pipeline_ranks: Global ranks of this rank's pipeline, by pipeline rank.
        data_ranks: Global ranks that hold the same stages, by data rank.
        last_rank: Global rank that holds the last stage of this rank's pipeline.
        scope: Which ranks run the user's code together just now.
        pipeline_group: Group of ``pipeline_ranks``, once ``build_groups`` has run.
        data_group: Group of ``data_ranks``, once ``build_groups`` has run.
    """

    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup

    def __init__(
        self,
        sizes: MeshSizes,
        schedule: Schedule,
        global_rank: int,
        stages_per_rank: int | Auto = "auto",
    ) -> None:
        assert 0 <= global_rank < sizes.pipeline * sizes.data, (global_rank, sizes)
        self.sizes = sizes
        self.global_rank = global_rank
        position, self.data_rank = divmod(global_rank, sizes.data)
        self.data_ranks = self._replicas(position)
        self._arrange(schedule, stages_per_rank)
        self._timeout: timedelta | None = None
        self._device: torch.device | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.scope = Scope.ALL

    def _arrange(self, schedule: Schedule, stages_per_rank: int | Auto) -> None:
        self.schedule = schedule
        self.stages_per_rank = schedule.resolve_stages_per_rank(stages_per_rank)
        self.num_stages = self.sizes.pipeline * self.stages_per_rank
        self.pipeline_ranks = self._pipeline(self.data_rank)
        self.pipeline_rank = self.pipeline_ranks.index(self.global_rank)
        self.stages = schedule.stages_of_rank(
            self.pipeline_rank, self.sizes.pipeline, self.stages_per_rank
        )
        self.is_last = self.num_stages - 1 in self.stages
        (self.last_rank,) = self.holder_ranks(frozenset({self.num_stages - 1}))

    def reschedule(self, schedule: Schedule, stages_per_rank: int) -> None:
        """Deals the stages out for another schedule, before anything has been placed.

        Every rank must call it; the replicas stay what they are.

        Args:
            schedule: The schedule.
            stages_per_rank: Stages that each rank holds.
        """
        self._arrange(schedule, stages_per_rank)
        self.build_groups(self._timeout, self._device)

    @contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Narrows the scope for a block of the user's code."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    def _pipeline(self, data_rank: int) -> tuple[int, ...]:
        """Global ranks of one replica, by pipeline rank.

        Loggers, progress bars and predictions live on global rank 0, so that is where the last
        stage should be. A loop ends on its last rank and is turned round; a V ends on its first.
        """
        start, step = data_rank, self.sizes.data
        ranks = range(start, self.sizes.pipeline * step, step)
        return tuple(ranks if self.schedule.placement == "v" else reversed(ranks))

    def _replicas(self, position: int) -> tuple[int, ...]:
        """Global ranks at one position of the pipeline axis, by data rank."""
        return tuple(range(position * self.sizes.data, (position + 1) * self.sizes.data))

    def holder_ranks(self, stages: frozenset[int], data_rank: int | None = None) -> tuple[int, ...]:
        """Returns the global ranks of one pipeline that hold any of some stages.

        Args:
            stages: Indices of stages.
            data_rank: Index of the replica; ``None`` is this rank's own.
        """
        ranks = self._pipeline(self.data_rank if data_rank is None else data_rank)
        holders = {
            self.schedule.rank_of_stage(stage, self.sizes.pipeline, self.stages_per_rank)
            for stage in stages
        }
        return tuple(ranks[holder] for holder in sorted(holders))

    def build_groups(
        self, timeout: timedelta | None = None, device: torch.device | None = None
    ) -> None:
        """Builds the groups of all pipelines and of all replicas; every rank must call it.

        Args:
            timeout: How long a collective may take; ``None`` is the default group's.
            device: The rank's device; ``None`` is the host.
        """
        self._timeout, self._device = timeout, device
        for data_rank in range(self.sizes.data):
            self._build(self._pipeline(data_rank), timeout)
        for position in range(self.sizes.pipeline):
            self._build(self._replicas(position), timeout)
        pipeline, data = self._groups[self.pipeline_ranks], self._groups[self.data_ranks]
        assert pipeline is not None and data is not None
        self.pipeline_group, self.data_group = pipeline, data
        if device is not None and not transfers.is_host(device):
            # The first message of a group over NCCL must be one of all its ranks.
            for group in (pipeline, data):
                dist.all_reduce(torch.zeros((), device=device), group=group)

    def leave(self) -> None:
        """Ends all groups; without it the threads of gloo may abort a process that exits."""
        self._groups.clear()
        self.__dict__.pop("pipeline_group", None)
        self.__dict__.pop("data_group", None)
        if dist.is_initialized():
            dist.destroy_process_group()

    def build_holder_groups(
        self, sets: Sequence[frozenset[int]], timeout: timedelta | None = None
    ) -> list[dist.ProcessGroup | None]:
        """Builds groups of the ranks that share something which several stages hold.

        Every rank must call it with the same sets in the same order, because a group is built by
        all ranks together.

        Args:
            sets: For each shared thing, the stages that hold it.
            timeout: How long a collective may take; ``None`` is the default group's.

        Returns:
            For each set the group inside this rank's pipeline, ordered by pipeline rank; ``None``
            where fewer than two ranks hold the stages or this rank is not one of them.
        """
        groups: list[dist.ProcessGroup | None] = []
        for stages in sets:
            for data_rank in range(self.sizes.data):
                ranks = self.holder_ranks(stages, data_rank)
                if len(ranks) > 1:
                    self._build(ranks, timeout)
            groups.append(self._groups.get(self.holder_ranks(stages)))
        return groups

    def _build(self, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
        # All ranks remember the same groups, so either all of them build one or none does.
        if ranks in self._groups:
            return
        # The order of the ranks is the order inside the group: messages are addressed by the rank
        # inside the pipeline.
        backend = with_host(dist.get_backend_config())
        group = dist.new_group(list(ranks), timeout, backend, sort_ranks=False)
        self._groups[ranks] = group if self.global_rank in ranks else None
        calm_gloo()
