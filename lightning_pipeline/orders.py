"""Orders of work by their definition: what each rank of a pipeline computes, in order.

Torch runs its single-stage schedules from code and lists them for display only (its list of 1F1B
leaves out a forward), so they are written down here with those that torch does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_pipeline.actions import Action
from lightning_pipeline.packing import Costs, pack
from lightning_pipeline.simulate import StageBytes, StageTime, simulate

Lists = list[list[Action]]
"""For each rank of one pipeline, its actions."""


def gpipe(ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    """All forwards, then all backwards.

    Source: Huang et al., GPipe, 2019.
    """
    return [list(_single(stage, microbatches, microbatches)) for stage in range(ranks)]


def one_f_one_b(ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    """One forward and one backward in turn, as soon as the first microbatch is through.

    Source: Narayanan et al., PipeDream-Flush, 2021, section 2.2.
    """
    return [list(_single(stage, microbatches, ranks - stage)) for stage in range(ranks)]


def zb_h1(ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    """1F1B whose weight gradients wait until every rank holds as much as the first.

        rank 0  0F0 0F1 ... 0I0 0W0 0F2 0I1 0W1 ... 0I2 0W2
        rank 1  ... 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 ...

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.1.
    """
    return [
        list(_single(stage, microbatches, ranks - stage, delay=stage)) for stage in range(ranks)
    ]


def zb_h2(ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    """ZB-H1 with nearly twice the forwards ahead: a rank that has begun never waits.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2.
    """
    return [
        list(_single(stage, microbatches, 2 * (ranks - stage) - 1, delay=2 * stage))
        for stage in range(ranks)
    ]


def _single(
    stage: int, microbatches: int, warmup: int, delay: int | None = None
) -> Iterator[Action]:
    """The order of a rank with one stage.

    Args:
        stage: Index of the stage.
        microbatches: Number of microbatches.
        warmup: Forwards before the first backward.
        delay: Input gradients between that of a microbatch and its weight gradients; ``None``:
            the backward is not split.
    """
    for m in range(min(warmup, microbatches)):
        yield Action(stage, "F", m)
    for m in range(microbatches):
        yield Action(stage, "B" if delay is None else "I", m)
        if delay is not None and m >= delay:
            yield Action(stage, "W", m - delay)
        if m + warmup < microbatches:
            yield Action(stage, "F", m + warmup)
    if delay is not None:
        for m in range(max(0, microbatches - delay), microbatches):
            yield Action(stage, "W", m)


def v_half(ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    """Half the activations of 1F1B on every rank, by a V whose way down takes two units a rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024, section 3.
    """
    p, shift = ranks, 3 if ranks % 2 == 0 else 0
    starts = [
        (2 * i, 3 * p - 2 - i, 3 * p - 1 + 2 * i + shift, 6 * p - 2 - i + shift) for i in range(p)
    ]
    return _repeated(starts, microbatches)


def v_min(ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    """A third of the activations of 1F1B on every rank, by a V that is as steep as can be.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024, section 3.
    """
    p, shift = ranks, 2 if ranks % 3 == 0 else 0
    starts = [(i, 2 * p - 1 - i, 2 * p + i + shift, 4 * p - 1 - i + shift) for i in range(p)]
    return _repeated(starts, microbatches)


_PERIOD = 6  # units of time between two microbatches: two stages, three operations


def _repeated(starts: Sequence[tuple[int, int, int, int]], microbatches: int) -> Lists:
    """Repeats a building block, and closes its gaps where its memory allows that.

    Args:
        starts: For each rank, when the first microbatch begins its forward on the way down and on
            the way up, and its input gradients on the way back, in units; no two fall on the same
            place of a period, and the weight gradients take the places that are left.
        microbatches: Number of microbatches.
    """
    num_stages = 2 * len(starts)
    lists = [
        _row((rank, num_stages - 1 - rank), own, microbatches) for rank, own in enumerate(starts)
    ]
    times, each = [StageTime(1, 1, 1)] * num_stages, [StageBytes(1, 1)] * num_stages
    peak = max(simulate(lists, times).peak_activations)
    costs = Costs(times, bytes=each, limits=[peak] * len(starts))
    found = [pack(lists, costs, rule) for rule in (None, gradients_first)]
    return min(found, key=lambda lists: simulate(lists, times).makespan)


def _row(
    stages: tuple[int, int], starts: tuple[int, int, int, int], microbatches: int
) -> list[Action]:
    (low, high), (down, up, back, end) = stages, starts
    placed = {
        start + _PERIOD * m: action
        for m in range(microbatches)
        for start, action in (
            (down, Action(low, "F", m)),
            (up, Action(high, "F", m)),
            (back, Action(high, "I", m)),
            (end, Action(low, "I", m)),
        )
    }
    assert len(placed) == 4 * microbatches, "two actions of a block fall on one place"
    row: list[Action] = []
    waiting: list[Action] = []
    for now in range(max(placed) + 1):
        action = placed.get(now)
        if action is not None:
            row.append(action)
            if action.op == "I":
                waiting.append(action._replace(op="W"))
        elif waiting:
            row.append(waiting.pop(0))
    return row + waiting


def gradients_first(action: Action) -> tuple[float, ...]:
    """The rule of `pack` that does gradients of inputs first and those of weights last."""
    return "BIFW".index(action.op), action.microbatch
