"""docs/schedules.md says of every schedule what the simulation says."""

from __future__ import annotations

import pytest

from benchmarks import schedules as page
from lightning_pipeline.actions import action_lists
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule
from lightning_pipeline.simulate import StageTime, simulate


def test_page_is_what_the_command_writes() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), (
        "Run: python -m benchmarks.schedules"
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_schedule_has_words_on_when_to_take_it(schedule: Schedule) -> None:
    assert page.ADVICE.get(schedule.name), "add them to ADVICE in benchmarks/schedules.py"


def test_words_agree_with_the_figures() -> None:
    def bubble(name: str, ranks: int = 4, m: int = 16, message: float = 0.0) -> float:
        found = page.figures(get_schedule(name), ranks, m, page.EQUAL, message)
        assert found is not None
        return found.bubble

    def loss(name: str) -> float:
        return bubble(name, message=0.5) - bubble(name)

    names = [entry.name for entry in SCHEDULES]
    for ranks in page.RANKS:
        least = min(bubble(name, ranks, 2 * ranks) for name in names)
        assert bubble("ZBVZeroBubble", ranks, 2 * ranks) == pytest.approx(least)
        assert bubble("GPipe", ranks) == pytest.approx(bubble("1F1B", ranks))
        assert bubble("LoopedBFS", ranks) == pytest.approx(bubble("Interleaved1F1B", ranks))
    assert min(names, key=loss) == "ZBH2"
    assert set(sorted(names, key=loss)[-2:]) == {"VHalf", "VMin"}
    assert loss("LoopedBFS") < loss("Interleaved1F1B") and loss("GPipe") < loss("1F1B")


def test_figures_of_known_orders() -> None:
    """By hand: (p - 1) / (m + p - 1) of the time, p in flight, there and back over p - 1 links."""
    found = page.figures(get_schedule("1f1b"), 4, 8, page.EQUAL)
    assert found == (pytest.approx(3 / 11), 4, 6)
    assert page.figures(get_schedule("1f1b"), 4, 3, page.EQUAL) is None


def test_figures_are_of_stages_that_share_a_rank() -> None:
    schedule = get_schedule("zbv_zero_bubble")
    lists = action_lists(schedule, 4, 2, 16)
    timeline = simulate(lists, [StageTime(0.5, 0.6, 0.4)] * 8, 0.25)
    found = page.figures(schedule, 4, 16, page.UNEQUAL, 0.25)
    assert found is not None
    assert found.bubble == timeline.bubble
    assert found.peak == max(timeline.peak_activations) / 2
    assert found.messages == 2 * (8 - 2)  # the two stages at the turn are on one rank
