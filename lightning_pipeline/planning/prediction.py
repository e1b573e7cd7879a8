"""What one way to run a training will take, in seconds and bytes, without running it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.packing import Costs
from lightning_pipeline.planning.blueprint import Drawing
from lightning_pipeline.planning.candidates import Candidate
from lightning_pipeline.planning.devices import Device
from lightning_pipeline.planning.loads import Load
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.simulate import (
    Link,
    StageBytes,
    StageTime,
    Timeline,
    peak_bytes,
    simulate,
)
from lightning_pipeline.splitting import Rates


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds at its fullest moment, in bytes.

    Attributes:
        weights: Parameters and buffers.
        gradients: Their gradients.
        optimizer: State of the optimizer.
        activations: What forwards have left for backwards, at its peak.
        working: Messages under way, and gradients inside the largest piece.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All together."""
        parts = self.weights, self.gradients, self.optimizer, self.activations, self.working
        return float(sum(parts))


class Prediction:
    """What a candidate will take, worked out as far as it is asked for.

    Times are those of `Work` at the device's rates, and of the Python of each action. A step is
    simulated with the links between the ranks and the reduction of gradients over the replicas.
    Memory is that of the fullest moment in the order of actions.

    Args:
        candidate: The way to run the training.
        drawing: The module in as many stages.
        rows: Rows of a replica's batch.
        device: The device.
        rates: Its speed in the dtype of the training.

    Attributes:
        loads: What each stage does for one microbatch.
        times: For each stage, its durations.
    """

    def __init__(
        self, candidate: Candidate, drawing: Drawing, rows: int, device: Device, rates: Rates
    ) -> None:
        self.candidate, self.drawing, self._device = candidate, drawing, device
        self._rows, self._rates = rows, rates
        self.loads = drawing.loads(rows / candidate.microbatches)
        self._again = _recomputed(candidate)
        self.times = tuple(
            _time(load, rates, device, again)
            for load, again in zip(self.loads, self._again, strict=True)
        )
        self._keeps = self._kept(candidate.schedule.splits_backward)

    def _kept(self, splits: bool) -> list[StageBytes]:
        pairs = zip(self.loads, self._again, strict=True)
        return [_bytes(load, again, splits) for load, again in pairs]

    @property
    def reserved(self) -> float:
        """Bytes of a device that are not for this."""
        return self._device.reserved

    @cached_property
    def timeline(self) -> Timeline:
        """When every action of a step runs."""
        return simulate(self.lists, self.times, self._links, self._reductions)

    @cached_property
    def _links(self) -> Link:
        return _link(self.candidate, self.loads, self._device)

    @cached_property
    def _reductions(self) -> list[float] | None:
        return _reductions(self.candidate, self.drawing, self._device)

    def costs(self, limit: float) -> Costs:
        """What other orders of the same work are judged by.

        Args:
            limit: Bytes of a device.
        """
        room = limit - self.reserved
        limits = [room - (held.total - held.activations) for held in self.memory]
        bounded = room < float("inf")
        return Costs(
            self.times,
            self._links,
            self._kept(splits=True),
            limits if bounded else (),
            self._reductions,
        )

    def with_schedule(self, schedule: Schedule) -> Prediction:
        """The prediction for another order on the same stages."""
        candidate = self.candidate._replace(schedule=schedule)
        return Prediction(candidate, self.drawing, self._rows, self._device, self._rates)

    @property
    def lists(self) -> list[list[Action]]:
        """For each rank of a pipeline, its actions in order."""
        schedule, ranks, _, depth, microbatches, _ = self.candidate
        return _lists(schedule, ranks, depth, microbatches)

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.timeline.makespan

    @property
    def samples_per_second(self) -> float:
        """Rows a second in all replicas together."""
        return 1 / self.seconds_per_sample

    @property
    def seconds_per_sample(self) -> float:
        """Time of a row of all replicas together."""
        return self.seconds / (self._rows * self.candidate.replicas)

    @property
    def most_samples_per_second(self) -> float:
        """A bound of that, without a simulation: no rank begins before a microbatch reaches it."""
        microbatches, waits, slowest = self.candidate.microbatches, 0.0, 0.0
        ahead = [0.0]
        for time in self.times:
            ahead.append(ahead[-1] + time.forward)
        for held in self._held:
            busy = sum(self.times[stage].of("F") + self.times[stage].of("B") for stage in held)
            waits = ahead[min(held)]
            slowest = max(slowest, waits + microbatches * busy)
        return self._rows * self.candidate.replicas / slowest

    @property
    def _held(self) -> list[tuple[int, ...]]:
        schedule, ranks, _, depth, *_ = self.candidate
        return [schedule.stages_of_rank(rank, ranks, depth) for rank in range(ranks)]

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """For each rank of a pipeline, as the schedule numbers the ranks, what it holds."""
        return tuple(
            _memory(held, self.drawing, self.loads, peak_bytes(actions, self._keeps)[0])
            for held, actions in zip(self._held, self.lists, strict=True)
        )

    @cached_property
    def peak(self) -> float:
        """Bytes of the fullest rank's device."""
        return self.reserved + max(memory.total for memory in self.memory)


@functools.lru_cache(maxsize=1024)
def _lists(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> list[list[Action]]:
    return action_lists(schedule, ranks, stages_per_rank, microbatches)


def _recomputed(candidate: Candidate) -> list[bool]:
    last = candidate.num_stages - 1
    kind = candidate.recompute
    return [kind == "full" or (kind == "except_last" and s < last) for s in range(last + 1)]


def _time(load: Load, rates: Rates, device: Device, again: bool) -> StageTime:
    forward, backward = load.forward.seconds(rates), load.backward.seconds(rates)
    there, whole = device.with_python(forward), device.with_python(backward)
    if again:  # then the whole backward runs at once
        return StageTime(there, device.with_python(backward + forward) - forward, 0.0, forward)
    weight = load.weight.seconds(rates)
    inputs, weights = map(device.with_python, (max(0.0, backward - weight), weight))
    return StageTime(there, inputs, weights, joint=inputs + weights - whole)


def _bytes(load: Load, again: bool, splits: bool) -> StageBytes:
    if again:
        kept = load.received + load.own
        return StageBytes(kept, 0.0, max(0.0, load.saved - kept))
    return StageBytes(load.saved, load.deferred if splits else 0.0)


def _link(candidate: Candidate, loads: Sequence[Load], device: Device) -> Link:
    """The ways between neighbouring stages: seconds of each boundary, at one byte a second."""
    mesh, seconds, latency = _mesh(candidate), [], 0.0
    for stage in range(1, len(loads)):
        ways = []
        for replica in range(candidate.replicas):
            ends = [mesh.holder_ranks(frozenset({s}), replica)[0] for s in (stage - 1, stage)]
            ways.append(device.way(*ends))
        way = min(ways, key=lambda way: way.bandwidth)
        seconds.append(loads[stage].received / way.bandwidth)
        latency = max(latency, way.latency)
    return Link(latency, 1.0, seconds)


def _reductions(candidate: Candidate, drawing: Drawing, device: Device) -> list[float] | None:
    """Seconds of a ring over the replicas for each stage's gradients."""
    mesh, replicas = _mesh(candidate), candidate.replicas
    if replicas == 1:
        return None
    seconds = []
    for stage, state in enumerate(drawing.states):
        ends = [mesh.holder_ranks(frozenset({stage}), replica)[0] for replica in (0, replicas - 1)]
        way, hops = device.way(*ends), 2 * (replicas - 1)
        seconds.append(hops * (state.gradients / replicas / way.bandwidth + way.latency))
    return seconds


def _mesh(candidate: Candidate) -> Mesh:
    sizes = MeshSizes(candidate.ranks, candidate.replicas)
    return Mesh(sizes, candidate.schedule, 0, candidate.stages_per_rank)


def _memory(
    held: Sequence[int], drawing: Drawing, loads: Sequence[Load], activations: float
) -> RankMemory:
    states = [drawing.states[stage] for stage in held]
    # A value and a gradient of each boundary are under way at once.
    sent = [loads[stage + 1].received if stage + 1 < len(loads) else 0.0 for stage in held]
    came = [loads[stage].received for stage in held]
    return RankMemory(
        float(sum(state.weights for state in states)),
        float(sum(state.gradients for state in states)),
        float(sum(state.optimizer for state in states)),
        activations,
        2 * sum(sent) + sum(came) + max(loads[stage].largest for stage in held),
    )
