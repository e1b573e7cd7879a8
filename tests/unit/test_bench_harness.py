"""Turns and ratios on a clock that the test moves, and what is written about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_pipeline.bench import harness
from lightning_pipeline.bench.harness import Comparison, Spread, Turn, alternate, spread
from lightning_pipeline.bench.report import Report


class Clock:
    """A clock that stands still but for subjects' steps."""

    def __init__(self) -> None:
        self.time, self.order = 100.0, []


class Costs:
    """A subject whose steps take given seconds, one after another."""

    def __init__(self, clock: Clock, name: str, *seconds: float) -> None:
        self._clock, self._name, self._seconds = clock, name, list(seconds)

    def run(self, start: float, num_steps: int) -> float:
        self._clock.time = start
        self._clock.order.append(self._name)
        for _ in range(num_steps):
            self._clock.time += self._seconds.pop(0)
        return self._clock.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(harness, "now", lambda: clock.time)
    monkeypatch.setattr(harness, "_reduced", lambda value, operation: value)
    return clock


def test_subjects_alternate_and_warmup_does_not_count(clock: Clock) -> None:
    a, b = Costs(clock, "a", 9.0, 2.0, 3.0, 8.0), Costs(clock, "b", 9.0, 1.0, 1.0, 2.0)
    found = alternate({"a": a, "b": b}, rounds=3, warmup=1)
    assert clock.order == ["a", "b"] * 4
    assert [turn.seconds for turn in found.turns["a"]] == pytest.approx([2.0, 3.0, 8.0])
    # Pair by pair: 2, 3, 4; the medians of both would give 3 as well, their means 4.33 / 1.33.
    assert found.ratio("a", "b") == pytest.approx((3.0, 2.5, 3.5, 2.0, 4.0))


def test_the_ratio_is_of_pairs_not_of_medians() -> None:
    turns = {"a": (1.0, 4.0, 9.0), "b": (1.0, 1.0, 9.0)}
    found = Comparison({k: [Turn(t, 0.0, []) for t in v] for k, v in turns.items()})
    assert found.ratio("a", "b").median == 1.0
    assert found.seconds("a").median / found.seconds("b").median == 4.0


def test_a_step_is_a_part_of_its_turn(clock: Clock) -> None:
    found = alternate({"a": Costs(clock, "a", 1.0, 3.0)}, rounds=1, warmup=0, steps=2)
    assert [turn.seconds for turn in found.turns["a"]] == pytest.approx([2.0])


def test_what_is_collected_is_kept_with_its_turn(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(
        harness.dist, "all_gather_object", lambda into, mine: into.__setitem__(0, mine)
    )
    notes = iter("xyz")
    a = Costs(clock, "a", 1.0, 1.0, 1.0)
    found = alternate({"a": a}, rounds=2, warmup=1, collect=lambda: next(notes))
    assert [turn.collected for turn in found.turns["a"]] == [["y"], ["z"]]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([2.0], (2, 2, 2, 2, 2)), ([4.0, 1.0, 2.0, 3.0, 5.0], (3, 2, 4, 1, 5))],
)
def test_spread(numbers: list[float], expected: tuple[float, ...]) -> None:
    assert spread(numbers) == Spread(*expected)


def test_report_has_its_command_and_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/anywhere/lightning-pipeline", "bench", "ranks=[2]", "a b"])
    report = Report("x", "What it is.", {"rounds": 3}, {"name": "name", "ratio": "a / b"})
    report.add(name="one", ratio=spread([1.0, 2.0, 3.0]), hidden=7)
    report.add(name="two")
    report.write(tmp_path)
    rows = ["| name | a / b |", "|---|---|", "| one | 2.000 (1.500 to 2.500) |", "| two |  |"]
    assert capsys.readouterr().out.splitlines() == rows
    table = (tmp_path / "table.md").read_text()
    assert "\n".join(rows) in table
    assert "`lightning-pipeline bench 'ranks=[2]' 'a b'`" in table
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["rows"][0]["ratio"]["median"] == 2.0
    assert found["rows"][0]["hidden"] == 7
    assert found["machine"]["cores"] >= 1
    assert len(found["load_at_end"]) == 3
