"""The one table of pipeline schedules: names, placement of stages and legal counts.

Everything that depends on a schedule (checks, action lists, pictures, documentation, tests) asks
this table; no other module compares a schedule's name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_pipeline import orders
from lightning_pipeline.wording import plural

Auto = Literal["auto"]
AUTO = "auto"
"""What stands for a schedule that is chosen."""

Placement = Literal["loop", "v"]

# "auto" keeps four microbatches a rank in flight: the bubble of 1F1B is then below one fifth at
# any number of ranks, and the microbatches are still large enough to fill a device.
MICROBATCHES_PER_RANK = 4


Order = Callable[[int, int, int], orders.Lists]
"""Makes action lists for ranks, stages on each rank and microbatches."""


class Sizes(NamedTuple):
    """What a list that is written down is for.

    Attributes:
        ranks: Number of ranks in one pipeline.
        microbatches: Number of microbatches in a step.
    """

    ranks: int
    microbatches: int


@dataclass(frozen=True)
class Schedule:
    """What one schedule asks for and where it puts the stages.

    Example:
        >>> schedule = get_schedule("zbv_zero_bubble")
        >>> schedule.stages_of_rank(0, ranks=4, stages_per_rank=2)
        (0, 7)

    Attributes:
        name: The name exactly as torch spells it; of a user's schedule, its file.
        snake: The name in snake case, as configuration files and registered strategies use it.
        min_stages_per_rank: Fewest stages that one rank holds.
        max_stages_per_rank: Most stages that one rank holds; ``None`` is any number.
        placement: ``"loop"`` deals stages out round by round, ``"v"`` deals them out and back.
        splits_backward: Whether input and weight gradients are computed at different times.
        at_least_stages: Whether there must be a microbatch for every stage of the pipeline.
        whole_rounds: Whether microbatches run in equal rounds of at least one per rank.
        order: What makes its action lists; ``None`` is torch.
        in_torch: Whether torch has it, too.
        sizes: The only sizes that it is for; ``None`` is any that the rest allows.
    """

    name: str
    snake: str
    min_stages_per_rank: int = 1
    max_stages_per_rank: int | None = 1
    placement: Placement = "loop"
    splits_backward: bool = False
    at_least_stages: bool = False
    whole_rounds: bool = False
    order: Order | None = None
    in_torch: bool = True
    sizes: Sizes | None = None

    @property
    def is_single(self) -> bool:
        """Whether every rank holds exactly one stage."""
        return self.max_stages_per_rank == 1

    @property
    def default_stages_per_rank(self) -> int:
        """What ``stages_per_rank="auto"`` means."""
        return max(self.min_stages_per_rank, 1 if self.is_single else 2)

    def resolve_stages_per_rank(self, value: int | Auto) -> int:
        """Returns the number of stages that each rank holds.

        Args:
            value: The user's argument; ``"auto"`` is 1 for single-stage schedules, 2 otherwise.

        Raises:
            ValueError: If the schedule can't run with that many stages on a rank.
        """
        if value == "auto":
            return self.default_stages_per_rank
        require_count("stages_per_rank", value)
        low, high = self.min_stages_per_rank, self.max_stages_per_rank
        if value < low or (high is not None and value > high):
            rule = f"{'exactly' if low == high else 'at least'} {plural(low, 'stage')}"
            raise ValueError(
                f"{self.name} needs {rule} on each rank, got {value}. The number comes "
                f"from stages_per_rank={value}. Set stages_per_rank={self.default_stages_per_rank}"
                ' or stages_per_rank="auto".'
            )
        return value

    def stages_of_rank(self, rank: int, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Returns the indices of the stages that one rank holds, in rising order.

        Args:
            rank: Rank inside one pipeline, as torch numbers it: rank 0 holds stage 0.
            ranks: Number of ranks in one pipeline.
            stages_per_rank: Number of stages that each rank holds.
        """
        assert 0 <= rank < ranks, (rank, ranks)
        if self.placement == "v":
            return (rank, 2 * ranks - 1 - rank)
        return tuple(range(rank, ranks * stages_per_rank, ranks))

    def rank_of_stage(self, stage: int, ranks: int, stages_per_rank: int) -> int:
        """Returns the rank inside the pipeline that holds a stage.

        Args:
            stage: Index of the stage.
            ranks: Number of ranks in one pipeline.
            stages_per_rank: Number of stages that each rank holds.
        """
        assert 0 <= stage < ranks * stages_per_rank, (stage, ranks, stages_per_rank)
        if self.placement == "v":
            return min(stage, 2 * ranks - 1 - stage)
        return stage % ranks

    def min_microbatches(self, ranks: int, stages_per_rank: int) -> int:
        """Returns the smallest legal number of microbatches."""
        return ranks * stages_per_rank if self.at_least_stages else 1

    def allows_microbatches(self, m: int, ranks: int, stages_per_rank: int) -> bool:
        """Returns whether a step may run ``m`` microbatches."""
        if self.sizes is not None:
            return m == self.sizes.microbatches
        if m < self.min_microbatches(ranks, stages_per_rank):
            return False
        return not self.whole_rounds or m % _rounds(m, ranks) == 0

    def nearest_microbatches(self, m: int, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Returns the legal counts nearest to ``m``: one below (if there is one) and one above.

        A legal ``m`` is its own nearest count and is returned alone.
        """
        low = self._at_most(m, ranks, stages_per_rank)
        high = self._at_least(m, ranks, stages_per_rank)
        return (high,) if low in (None, high) else (low, high)

    def _at_most(self, m: int, ranks: int, stages_per_rank: int) -> int | None:
        counts = range(m, 0, -1)
        legal = (k for k in counts if self.allows_microbatches(k, ranks, stages_per_rank))
        return next(legal, None)

    def _at_least(self, m: int, ranks: int, stages_per_rank: int) -> int:
        if self.sizes is not None:
            return self.sizes.microbatches
        # Every multiple of the ranks makes whole rounds, so the search is at most one round long.
        m = max(m, self.min_microbatches(ranks, stages_per_rank))
        while not self.allows_microbatches(m, ranks, stages_per_rank):
            m += 1
        return m

    def check(
        self, ranks: int, stages_per_rank: int | Auto = "auto", microbatches: int | Auto = "auto"
    ) -> None:
        """Checks the sizes of a pipeline before any process starts.

        Args:
            ranks: Number of ranks in one pipeline.
            stages_per_rank: Number of stages that each rank holds.
            microbatches: Number of microbatches in a step; ``"auto"`` is always legal.

        Raises:
            ValueError: If the schedule can't run with these sizes; names the nearest that work.
        """
        require_count("pipeline_parallel_size", ranks)
        v = self.resolve_stages_per_rank(stages_per_rank)
        self.check_ranks(ranks)
        if microbatches == "auto":
            return
        require_count("num_microbatches", microbatches)
        if self.allows_microbatches(microbatches, ranks, v):
            return
        least = self.min_microbatches(ranks, v)
        if self.sizes is not None:
            own = plural(self.sizes.microbatches, "microbatch", "es")
            rule = f"the {own} of its lists, got {microbatches}"
        elif microbatches < least:
            rule = (
                f"at least as many microbatches as stages, got {microbatches} for "
                f"{plural(least, 'stage')}. The stages come from pipeline_parallel_size={ranks} "
                f"x stages_per_rank={v}"
            )
        else:
            rounds = _rounds(microbatches, ranks)
            rule = (
                f"microbatches that fill whole rounds, got {microbatches} for "
                f"{plural(rounds, 'round')}. The rounds come from "
                f"num_microbatches={microbatches} // pipeline_parallel_size={ranks}"
            )
        cure = " or ".join(
            f"num_microbatches={k}" for k in self.nearest_microbatches(microbatches, ranks, v)
        )
        raise ValueError(f'{self.name} needs {rule}. Set {cure} or num_microbatches="auto".')

    def check_ranks(self, ranks: int) -> None:
        """Checks the number of ranks in one pipeline.

        Raises:
            ValueError: If the schedule's lists are for another number.
        """
        if self.sizes is not None and ranks != self.sizes.ranks:
            raise ValueError(
                f"{self.name} needs a rank for each of its {plural(self.sizes.ranks, 'row')}, got "
                f"{plural(ranks, 'rank')}. They come from the devices and "
                f"pipeline_parallel_size={ranks}. Set "
                f"pipeline_parallel_size={self.sizes.ranks}, or "
                f"stages={self.sizes.ranks * self.default_stages_per_rank} on the command line."
            )

    def choose_microbatches(
        self,
        rows: int,
        requested: int | Auto,
        ranks: int,
        stages_per_rank: int,
        min_rows: int = 1,
    ) -> tuple[int, int]:
        """Chooses into how many microbatches a batch is cut.

        A batch that is too small for any legal count is cut as far as its rows allow, and the
        count is filled up with microbatches of weight zero.

        Example:
            >>> get_schedule("1F1B").choose_microbatches(10, "auto", ranks=4, stages_per_rank=1)
            (10, 10)
            >>> get_schedule("1F1B").choose_microbatches(3, "auto", ranks=4, stages_per_rank=1)
            (3, 4)

        Args:
            rows: Number of rows in the batch.
            requested: Most microbatches to use, met exactly when the rows suffice; ``"auto"`` is
                four a rank.
            ranks: Number of ranks in one pipeline.
            stages_per_rank: Number of stages that each rank holds.
            min_rows: Fewest rows that a microbatch may hold.

        Returns:
            The number of microbatches that hold rows, and the legal number that the schedule runs.

        Raises:
            ValueError: If ``requested`` is not legal or the batch has no rows.
        """
        require_count("the number of rows in a batch", rows)
        self.check(ranks, stages_per_rank, requested)
        limit = MICROBATCHES_PER_RANK * ranks if requested == "auto" else requested
        if self.sizes is not None:
            limit = self.sizes.microbatches
        room = max(1, rows // min_rows)
        legal = self._at_most(min(limit, room), ranks, stages_per_rank)
        if legal is not None:
            return legal, legal
        real = min(limit, room)
        return real, self._at_least(real, ranks, stages_per_rank)


def _rounds(microbatches: int, ranks: int) -> int:
    """Number of rounds that torch's interleaved schedules cut the microbatches into."""
    return max(1, microbatches // ranks)


SCHEDULES: tuple[Schedule, ...] = (
    Schedule("GPipe", "gpipe", order=orders.gpipe),
    Schedule("1F1B", "1f1b", at_least_stages=True, order=orders.one_f_one_b),
    Schedule("Interleaved1F1B", "interleaved_1f1b", max_stages_per_rank=None, whole_rounds=True),
    Schedule("LoopedBFS", "looped_bfs", max_stages_per_rank=None),
    Schedule(
        "InterleavedZeroBubble",
        "interleaved_zero_bubble",
        max_stages_per_rank=None,
        splits_backward=True,
        whole_rounds=True,
    ),
    Schedule(
        "ZBVZeroBubble",
        "zbv_zero_bubble",
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        placement="v",
        splits_backward=True,
    ),
    Schedule(
        "DualPipeV",
        "dualpipev",
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        placement="v",
        splits_backward=True,
        at_least_stages=True,
    ),
    Schedule("ZBH1", "zb_h1", splits_backward=True, order=orders.zb_h1, in_torch=False),
    Schedule("ZBH2", "zb_h2", splits_backward=True, order=orders.zb_h2, in_torch=False),
    Schedule(
        "VHalf",
        "v_half",
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        placement="v",
        splits_backward=True,
        order=orders.v_half,
        in_torch=False,
    ),
    Schedule(
        "VMin",
        "v_min",
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        placement="v",
        splits_backward=True,
        order=orders.v_min,
        in_torch=False,
    ),
)

_BY_NAME = {key.lower(): entry for entry in SCHEDULES for key in (entry.name, entry.snake)}


def get_schedule(name: str) -> Schedule:
    """Returns the schedule with a name.

    Args:
        name: A name of the table or its snake case, in upper or lower case, with hyphens or
            without, or the path of a file that ends in ``.csv``.

    Raises:
        ValueError: If there is no such schedule; names the nearest one. If a file's lists can't
            be run; names the action, the row and the column.
    """
    if is_file(name):
        from lightning_pipeline.order_files import read_schedule

        return read_schedule(name)
    schedule = _BY_NAME.get(str(name).lower().replace("-", "_"))
    if schedule is not None:
        return schedule
    close = difflib.get_close_matches(str(name).lower(), _BY_NAME, n=1, cutoff=0.0)
    valid = ", ".join(f"{entry.name} ({entry.snake})" for entry in SCHEDULES)
    raise ValueError(
        f"The schedule must be one of {valid} or a .csv file, got {name!r}. The name comes from "
        f"schedule={name!r}. Set schedule={_BY_NAME[close[0]].name!r}."
    )


def is_file(name: str) -> bool:
    """Whether a name is the path of a schedule's own file."""
    return str(name).lower().endswith(".csv")


def require_count(name: str, value: object) -> None:
    """Checks that a value is a positive integer.

    Args:
        name: The argument that the value comes from.
        value: What the user passed.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} must be an integer of at least 1, got {value!r}. The value comes from the "
            f"argument of that name. Set it to 1 or more."
        )
