"""Figures that papers give for schedules, computed from the action lists."""

from __future__ import annotations

import pytest

from lightning_pipeline.actions import action_lists
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import StageBytes, StageTime, Timeline, simulate

UNIT = StageTime(1, 1, 1)


def run(name: str, ranks: int, m: int, v: int = 1, each: StageTime = UNIT) -> Timeline:
    return simulate(action_lists(get_schedule(name), ranks, v, m), [each] * (ranks * v))


def waits(timeline: Timeline, work: float) -> float:
    """The longest time of a rank from its first start to its last end, less its work."""
    return max(row[-1].end - row[0].start for row in timeline.spans) - work


@pytest.mark.parametrize(("ranks", "m"), [(2, 8), (4, 8), (4, 16), (8, 64)])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_bubble_of_megatron(ranks: int, m: int, v: int) -> None:
    """The time of the bubble over the ideal time is (p - 1) / (v m).

    Narayanan et al., Efficient Large-Scale Language Model Training, 2021, section 2.2.2.
    """
    each = StageTime(1 / v, 1 / v, 1 / v)
    timeline = run("Interleaved1F1B", ranks, m, v, each)
    ideal = 3 * m
    assert (timeline.makespan - ideal) / ideal == pytest.approx((ranks - 1) / (v * m), abs=1e-12)


TIMES = [(1, 1, 1), (1, 1.25, 0.75), (1, 0.75, 0.5), (1, 2, 1), (2, 2, 1)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "m"), [(1, 4), (2, 8), (4, 8), (4, 12), (8, 32)])
class TestZeroBubble:
    """Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.3 and table 2."""

    def test_size_of_bubbles(self, ranks: int, m: int, times: tuple[float, ...]) -> None:
        forward, inputs, weights = times
        expected = {
            "1F1B": (ranks - 1) * (forward + inputs + weights),
            "ZBH1": (ranks - 1) * (forward + inputs - weights),
            "ZBH2": (ranks - 1) * (forward + inputs - 2 * weights),
        }
        found = {
            name: waits(run(name, ranks, m, each=StageTime(*times)), m * sum(times))
            for name in expected
        }
        assert found == pytest.approx(expected, abs=1e-9)

    def test_peak_activations(self, ranks: int, m: int, times: tuple[float, ...]) -> None:
        each = StageTime(*times)
        peaks = {name: run(name, ranks, m, each=each).peak_activations for name in ("ZBH1", "ZBH2")}
        assert peaks["ZBH1"] == (ranks,) * ranks
        assert peaks["ZBH2"] == (min(2 * ranks - 1, m),) * ranks
        assert max(run("1F1B", ranks, m, each=each).peak_activations) == ranks


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (8, 16), (8, 24)])
def test_zero_bubble_of_equal_times(ranks: int, m: int) -> None:
    """1F1B: (p - 1) / (m + p - 1); ZB-H1 waits a third of it; none in ZB-H2 and ZB-V.

    Qi et al., 2023, section 2.3 and, for ZB-V, section 6: a bubble counts between the first start
    and the last end of a rank, as steps in a row follow each other.
    """
    assert run("1F1B", ranks, m).steady_bubble == pytest.approx((ranks - 1) / (m + ranks - 1))
    one, third = waits(run("1F1B", ranks, m), 3 * m), waits(run("ZBH1", ranks, m), 3 * m)
    assert third == one / 3
    assert run("ZBH1", ranks, m).steady_bubble == pytest.approx(third / (3 * m + third))
    assert run("ZBH2", ranks, m).steady_bubble == pytest.approx(0, abs=1e-12)
    assert run("ZBVZeroBubble", ranks, m, 2).steady_bubble == pytest.approx(0, abs=1e-12)


BARRIER = [
    (name, v, ranks, m)
    for name, v in {
        "ZBH1": 1,
        "ZBH2": 1,
        "InterleavedZeroBubble": 2,
        "ZBVZeroBubble": 2,
        "DualPipeV": 2,
    }.items()
    for ranks, m in [(1, 4), (2, 4), (2, 16), (4, 8), (4, 9), (8, 16), (8, 32)]
    if get_schedule(name).allows_microbatches(m, ranks, v)
]


@pytest.mark.parametrize(("name", "v", "ranks", "m"), BARRIER)
def test_steps_with_a_barrier_wait_only_for_the_first_forwards(
    name: str, v: int, ranks: int, m: int
) -> None:
    """The bubble is (p - 1) / (3 v m + p - 1), the least that there can be.

    The last rank can't begin before p - 1 forwards of others and has 3 v m units of work.
    """
    timeline = run(name, ranks, m, v)
    assert timeline.makespan == 3 * v * m + ranks - 1
    assert timeline.bubble == pytest.approx((ranks - 1) / (3 * v * m + ranks - 1), abs=1e-12)


@pytest.mark.parametrize("ranks", [*range(1, 13), 16])
@pytest.mark.parametrize("rounds", [2, 4])
def test_controllable_memory(ranks: int, rounds: int) -> None:
    """Half and a third of the activations of 1F1B, and the bubbles that belong to them.

    Qi et al., Pipeline Parallelism with Controllable Memory, 2024: (p + 2) // 2 and (p + 4) // 3
    microbatches where 1F1B has p, bubbles of about p / 2m and 2p / 3m where 1F1B has p / m, for
    equal times. https://huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory
    """
    m = rounds * ranks
    half, third = run("VHalf", ranks, m, 2), run("VMin", ranks, m, 2)
    # Each rank has two stages: one microbatch counts two.
    assert max(half.peak_activations) == 2 * ((ranks + 2) // 2 if ranks > 1 else 1)
    assert max(third.peak_activations) == 2 * ((ranks + 4) // 3)
    assert half.steady_bubble <= ranks / (2 * m)
    assert third.steady_bubble <= 2 * ranks / (3 * m)


def test_memory_beside_1f1b() -> None:
    """Bytes of the same model: a rank's whole part has one unit of activations."""
    ranks, m = 12, 48
    bytes_ = {1: [StageBytes(1, 1)] * 12, 2: [StageBytes(0.5, 0.5)] * 24}
    peaks = {
        name: max(run(name, ranks, m, v).peak_bytes(bytes_[v]))
        for name, v in {"1F1B": 1, "ZBH1": 1, "ZBVZeroBubble": 2, "VHalf": 2, "VMin": 2}.items()
    }
    assert peaks == {"1F1B": 12, "ZBH1": 12, "ZBVZeroBubble": 12, "VHalf": 7, "VMin": 5}


def test_balance_of_llama_3() -> None:
    """One layer fewer on the first and the last of 16 stages balances the head and the embedding.

    Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3.2: 126 layers on 16 stages. By
    table 3 a layer has 3.19e9 weights (16384 wide, 53248 in the feed-forward net, 8 key and value
    heads of 128) and the head 2.10e9 (128256 words), and each weight takes a product forward and
    two backward.
    """
    width, hidden, words, ranks, m = 16384, 53248, 128256, 16, 64
    layer = 2 * width * (width + 8 * 128) + 3 * width * hidden
    head = words * width
    assert (layer, head) == (pytest.approx(3.19e9, rel=1e-3), pytest.approx(2.10e9, rel=2e-3))

    def of(layers: list[int]) -> tuple[Timeline, float]:
        costs = [count + (head / layer if i == ranks - 1 else 0) for i, count in enumerate(layers)]
        lists = action_lists(get_schedule("1F1B"), ranks, 1, m)
        return simulate(lists, [StageTime(c, c, c) for c in costs]), max(costs)

    (even, slowest), (fewer, limit) = of([8] * 16), of([7, *[8] * 14, 7])
    assert slowest == pytest.approx(8.66, abs=0.01) and limit == 8
    # The last stage of an even cut waits for the first forwards and the last backwards alone.
    assert even.idle[-1] == pytest.approx(3 * 15 * 8)
    assert fewer.idle[-1] > 3 * (7 + 14 * 8)
    assert even.bubble > fewer.bubble
    assert fewer.makespan / 126 < even.makespan / 128
    # The first stage holds the most microbatches: its activations fall by one layer in eight.
    peaks = [
        timeline.peak_bytes([StageBytes(count) for count in layers])
        for timeline, layers in ((even, [8] * 16), (fewer, [7, *[8] * 14, 7]))
    ]
    assert (peaks[0][0], peaks[1][0], peaks[1][1]) == (16 * 8, 16 * 7, 15 * 8)
