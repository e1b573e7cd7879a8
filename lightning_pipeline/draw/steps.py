"""What pictures show: one step of the same model under one schedule or another."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipeline.actions import action_lists
from lightning_pipeline.schedules import Auto, Schedule
from lightning_pipeline.simulate import Link, StageTime, Timeline, simulate

# The kinds of work differ in lightness as well as in hue, so that they stay apart in print and for
# readers who don't see the hues. The second colour is that of the later stages of a rank.
COLOURS = {
    "F": ("#2f66ad", "#8fb4e3"),
    "B": ("#1c7d64", "#84cdb4"),
    "W": ("#e3a32c", "#f5d88f"),
}
LEGEND = {"F": "forward", "B": "backward (of inputs, if split)", "W": "backward of weights"}


_EQUAL = StageTime(1, 1, 1)
_LONGEST = 1e12  # steps of many of them can still be added and drawn


@dataclass(frozen=True)
class Step:
    """One training step of a model whose stages are all equal.

    Example:
        >>> f"{Step(ranks=4, microbatches=8).timeline(get_schedule('1F1B')).bubble:.3f}"
        '0.273'

    Attributes:
        ranks: Number of ranks in one pipeline.
        microbatches: Number of microbatches in a step.
        time: How long a microbatch takes on the whole part of one rank, in any unit; the stages of
            the rank share it equally, so that the model is the same under every schedule.
        message: Latency: time that a message is on its way to another rank, whatever its size.
        transfer: Time that a message occupies its direction of the link between its two ranks: its
            bytes over the bandwidth. The next one waits for that; all are of one size.
        stages_per_rank: Number of stages on each rank; ``"auto"`` is the schedule's default.
    """

    ranks: int = 4
    microbatches: int = 8
    time: StageTime = _EQUAL
    message: float = 0.0
    transfer: float = 0.0
    stages_per_rank: int | Auto = "auto"

    def __post_init__(self) -> None:
        names = ("forward", "backward_input", "backward_weight", "message", "transfer")
        times = (*self.time[:3], self.message, self.transfer)
        for name, value in zip(names, times, strict=True):
            _require_time(name, value)
        if self.time.forward == 0:
            raise ValueError(
                "A forward must take some time, got forward=0. The value comes from the argument "
                "of that name. Set forward=1 and the others in proportion."
            )

    def timeline(self, schedule: Schedule) -> Timeline:
        """Returns when every action of the step runs.

        Args:
            schedule: The schedule.

        Raises:
            ValueError: If the schedule can't run with these sizes.
        """
        v = schedule.resolve_stages_per_rank(self.stages_per_rank)
        lists = action_lists(schedule, self.ranks, v, self.microbatches)
        share = StageTime(*(part / v for part in self.time))
        num_stages = self.ranks * v
        link = Link(self.message, 1.0, [self.transfer] * (num_stages - 1))
        return simulate(lists, [share] * num_stages, link)


def _require_time(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= _LONGEST:  # type: ignore[operator]
        raise ValueError(
            f"{name} must be a time from 0 to {_LONGEST:g}, got {value!r}. The value comes "
            f"from the argument of that name. Set {name}=1, for instance."
        )


def stages_of(timeline: Timeline) -> list[list[int]]:
    """For each rank, its stages in rising order."""
    return [sorted({span.action.stage for span in row}) for row in timeline.spans]


def peaks_of(timeline: Timeline) -> list[float]:
    """For each rank, the most activations that it holds at once, in those of its whole part."""
    counts = zip(timeline.peak_activations, stages_of(timeline), strict=True)
    return [peak / len(own) for peak, own in counts]
