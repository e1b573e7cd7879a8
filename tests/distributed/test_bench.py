"""The benchmarks of the command line, on sizes that say nothing about speed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeline import cli


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    handlers = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = handlers


def bench(*overrides: str) -> list[dict[str, Any]]:
    """Rows that a benchmark of the command line writes."""
    assert cli.main(["bench", *overrides, "hydra.run.dir=out"]) == 0
    assert Path("out", "table.md").read_text().count("|---") >= 2
    rows: list[dict[str, Any]] = json.loads(Path("out", "results.json").read_text())["rows"]
    return rows


def test_limit() -> None:
    sizes = ["ranks=[2]", "microbatches=[2,4]", "milliseconds=[2]", "rounds=2", "warmup=1"]
    rows = bench("bench=limit", *sizes, "schedules=[DualPipeV]", "by_hand=true")
    assert [row["out_of_order"] for row in rows] == ["illegal", "none"]
    assert "at least as many microbatches as stages" in rows[0]["reason"]
    # No step is faster than its critical path, neither the nominal one nor that of its own sleeps.
    assert rows[1]["path"] == pytest.approx(0.002 * 25)
    assert rows[1]["ratio"]["least"] >= 1
    assert rows[1]["ratio_of_sleeps"]["least"] >= 1
    assert rows[1]["by_hand"]["least"] >= 1
    assert rows[1]["to_hand"]["median"] > 0


def test_refusal_has_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "bench=limit", "schedules=[2F2B]", "hydra.run.dir=out"])
    printed = capfd.readouterr().err
    assert caught.value.code == 2
    assert "got '2F2B'" in printed
    assert "Traceback" not in printed


def test_hand() -> None:
    sizes = ["blocks=4", "rows=8", "microbatches=4", "sizes.mlp.width=16"]
    ways = "ways=[hand 1F1B, hand 1F1B, ours ZBVZeroBubble 2, hand ZBVZeroBubble 2]"
    rows = bench("bench=hand", "models=[mlp]", *sizes, ways, "rounds=2", "warmup=1")
    assert [row["way"] for row in rows] == [
        "hand 1F1B",
        "hand 1F1B again",
        "ours ZBVZeroBubble 2",
        "hand ZBVZeroBubble 2",
    ]
    base, _, ours, same = rows
    assert base["to_base"]["median"] == base["promised"] == 1.0
    assert base["to_same"] is same["to_same"] is None
    assert ours["to_same"]["median"] > 0
    assert ours["promised"] == same["promised"] < 1.0
    # All have taken the same steps from the same weights, in float32.
    assert max(row["difference"] for row in rows) < 1e-6


def test_a_way_must_name_who_and_a_schedule(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "bench=hand", "ways=[torch 1F1B]", "hydra.run.dir=out"])
    printed = capfd.readouterr().err
    assert "A way must be 'hand' or 'ours'" in printed
    assert "got 'torch 1F1B'" in printed
    assert "Write 'ours InterleavedZeroBubble 2'." in printed


def test_a_model_must_be_there(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "bench=hand", "models=[mlp,con]", "hydra.run.dir=out"])
    printed = capfd.readouterr().err
    assert caught.value.code == 2
    assert "must be one of mlp, conv, gpt, got 'con'" in printed
    assert "comes from models. Set models=[conv]." in printed
    assert "Traceback" not in printed


def test_overlap() -> None:
    sizes = ["ranks=2", "replicas=2", "microbatches=2", "milliseconds=1", "width=64"]
    [row] = bench("bench=overlap", "schedules=[1F1B]", *sizes, "rounds=2", "warmup=1")
    assert row["megabytes"] == pytest.approx(4 * (64 * 64 + 64) / 1e6)
    assert row["without"]["least"] > 0.006
    assert row["alone"]["median"] > 0
    # The exchange is left out by one of them only: the median of two is their mean.
    mean = row["seconds"]["median"] - row["without"]["median"]
    assert row["exposed"]["median"] == pytest.approx(mean)


def test_planning() -> None:
    rows = bench("bench=planning", "num_layers=[2,6]", "num_stages=[2,4]")
    assert [(row["layers"], row["stages"]) for row in rows] == [(2, 2), (6, 2), (6, 4)]
    for row in rows:
        assert row["seconds"] == pytest.approx(row["record"] + row["partition"] + row["cut"])
        assert row["first"] > row["record"] / 10


def test_actions() -> None:
    rows = bench("bench=actions", "schedules=[1F1B]", "microbatches=[1,2,4]", "rounds=2")
    assert [(row["who"], row["microbatches"]) for row in rows] == [
        ("hand", 2),
        ("hand", 4),
        ("ours", 2),
        ("ours", 4),
    ]
    assert all(row["off"] == pytest.approx(0) for row in rows)  # a line through two points
    assert all((row["to_hand"] is None) == (row["who"] == "hand") for row in rows)


def test_memory() -> None:
    sizes = ["microbatches=[2,8]", "num_layers=4", "rows=4096"]
    rows = bench("bench=memory", "schedules=[GPipe]", *sizes)
    # A layer saves its input, what its norm makes of it, and the result of ReLU, twice as wide.
    saved = 4 * 4096 * 64 * 4 / 1e6
    few, many = (row["megabytes"][1] for row in rows)  # of two layers on the first stage
    assert (many - few) / (8 - 2) == pytest.approx(2 * saved, rel=0.05)
    assert rows[1]["ratio"][1] == pytest.approx(many / few)
