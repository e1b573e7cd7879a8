"""Which layouts of a model on some devices are legal, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_pipeline.schedules import (
    MICROBATCHES_PER_RANK,
    SCHEDULES,
    Auto,
    Schedule,
    require_count,
)
from lightning_pipeline.wording import one_of, plural

Recompute = Literal["none", "full", "except_last"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "except_last", "full")

_STAGES_PER_RANK = (2, 4)
_MOST_PER_RANK = 2 * MICROBATCHES_PER_RANK


class Candidate(NamedTuple):
    """One way to run a training.

    Attributes:
        schedule: The schedule.
        ranks: Ranks in one pipeline.
        replicas: Pipelines side by side.
        stages_per_rank: Stages that each rank holds.
        microbatches: Microbatches in a step.
        recompute: Which stages compute their forward again in the backward.
    """

    schedule: Schedule
    ranks: int
    replicas: int
    stages_per_rank: int
    microbatches: int
    recompute: Recompute

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.ranks * self.stages_per_rank


@dataclass(frozen=True)
class Bounds:
    """What is to be tried.

    Attributes:
        devices: Devices on all nodes together.
        rows: Rows in the batch of a replica.
        min_rows: Fewest rows of a microbatch.
        schedules: The schedules to try.
        ranks: Ranks in one pipeline; ``"auto"``: all that divide the devices.
        stages: Stages of the model; ``"auto"``: any number.
        stages_per_rank: Stages on each rank; ``"auto"``: two and four, where the
            schedule takes any number.
        microbatches: Microbatches in a step; ``"auto"``: those that divide the rows, from one for
            two ranks up to eight a rank.
        recompute: What may be recomputed.
    """

    devices: int
    rows: int
    min_rows: int = 1
    schedules: Sequence[Schedule] = SCHEDULES
    ranks: int | Auto = "auto"
    stages: int | Auto = "auto"
    stages_per_rank: int | Auto = "auto"
    microbatches: int | Auto = "auto"
    recompute: Sequence[Recompute] = RECOMPUTE

    @property
    def most_stages(self) -> int:
        """The most stages that any candidate has."""
        depth = max((max(self.depths(s), default=1) for s in self.schedules), default=1)
        return max(self.pipelines(), default=1) * depth

    def check(self) -> None:
        """Checks the numbers by themselves.

        Raises:
            ValueError: If one is no count, or leaves no layout; names what would.
        """
        for name in ("stages", "stages_per_rank", "microbatches"):
            if getattr(self, name) != "auto":
                require_count(name, getattr(self, name))
        for schedule in self.schedules if len(self.schedules) == 1 else ():
            schedule.resolve_stages_per_rank(self.stages_per_rank)
        legal = sorted(
            {n * d for n in self.pipelines() for s in self.schedules for d in self.depths(s)}
        )
        if self.stages != "auto" and self.stages not in legal:
            near = sorted(legal, key=lambda n: abs(n - self.stages))[:2]  # type: ignore[operator]
            raise ValueError(
                f"The stages must fill equal pipelines on {self.devices} devices, got "
                f"{self.stages}. The number comes from stages={self.stages}. Set "
                f"{' or '.join(f'stages={n}' for n in sorted(near))} or stages=auto."
            )

    def pipelines(self) -> list[int]:
        """Numbers of ranks in one pipeline."""
        if self.ranks != "auto":
            return [self.ranks]
        return [n for n in range(2, self.devices + 1) if self.devices % n == 0]

    def depths(self, schedule: Schedule) -> list[int]:
        """Numbers of stages that each rank may hold."""
        low, high = schedule.min_stages_per_rank, schedule.max_stages_per_rank
        if self.stages_per_rank != "auto":
            depth = self.stages_per_rank
            return [depth] if low <= depth and (high is None or depth <= high) else []
        if high is not None:
            return list(range(low, high + 1))
        # With one stage on each rank it is the twin of a schedule that is there for that.
        return list(_STAGES_PER_RANK)

    def counts(self, ranks: int, schedule: Schedule | None = None) -> list[int]:
        """Numbers of microbatches; that of a schedule's file need not divide the rows."""
        if self.microbatches != "auto":
            return [self.microbatches]
        if schedule is not None and schedule.sizes is not None:
            return [schedule.sizes.microbatches]
        most = min(self.rows // self.min_rows, _MOST_PER_RANK * ranks)
        least = min(max(1, ranks // 2), most)
        return [m for m in range(least, most + 1) if self.rows % m == 0] or [most]


@dataclass(frozen=True)
class Dropped:
    """Candidates that cannot be, and the number that can.

    Attributes:
        what: The schedule and the sizes.
        why: The reason, with the nearest legal count.
        kind: One word for reasons of the same kind.
    """

    what: str
    why: str
    kind: Literal["count", "pieces"]


def candidates(bounds: Bounds, num_pieces: int) -> Iterator[Candidate | Dropped]:
    """All candidates within bounds, and what is no candidate, with the reason.

    Args:
        bounds: What is to be tried.
        num_pieces: Number of pieces that stages can be made of.
    """
    for ranks in bounds.pipelines():
        for schedule in bounds.schedules:
            for depth in bounds.depths(schedule):
                if bounds.stages in ("auto", ranks * depth):
                    yield from _of_layout(bounds, num_pieces, schedule, ranks, depth)


def _of_layout(
    bounds: Bounds, num_pieces: int, schedule: Schedule, ranks: int, depth: int
) -> Iterator[Candidate | Dropped]:
    what = f"{schedule.name} with {ranks} x {plural(depth, 'stage')}"
    if ranks * depth > num_pieces:
        yield Dropped(what, f"the model has {plural(num_pieces, 'piece')}", "pieces")
        return
    if schedule.sizes is not None and ranks != schedule.sizes.ranks:
        yield Dropped(what, f"it is for {plural(schedule.sizes.ranks, 'rank')}", "count")
        return
    counts = bounds.counts(ranks, schedule)
    legal = [m for m in counts if schedule.allows_microbatches(m, ranks, depth)]
    if not legal:
        most = max(counts, default=1)
        nearest = schedule.nearest_microbatches(most, ranks, depth)
        yield Dropped(what, f"needs {one_of(nearest, 'microbatch', 'es')}", "count")
        return
    most = bounds.rows // bounds.min_rows
    for microbatches in legal:
        if microbatches > most:  # then it is filled up at run time, which wastes time
            asked = f"its {plural(microbatches, 'microbatch', 'es')} need "
            rows = plural(microbatches * bounds.min_rows, "row")
            yield Dropped(what, f"{asked}{rows}, the batch has {bounds.rows}", "count")
            continue
        for recompute in bounds.recompute:
            yield Candidate(
                schedule, ranks, bounds.devices // ranks, depth, microbatches, recompute
            )
