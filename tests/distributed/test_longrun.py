"""Nothing grows with the steps of a run."""

from __future__ import annotations

import pytest

from benchmarks.longrun import growth, run

BYTES = 1000.0
"""What a step may leave in memory."""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "steps", "every"), [("plain", 240, 4), ("interleaved", 240, 4), ("accumulated", 120, 2)]
)
def test_nothing_grows(case, steps, every, monkeypatch):
    # torch keeps its last 2,000 messages, which takes as long to be full
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20")
    for counts in run(case, steps, every, deadline=180):
        half = len(counts["step"]) // 2
        assert half == steps // every // 2
        for name in ("files", "threads", "store", "shared", "recordings"):
            values = set(counts[name][half:])
            assert len(values) == 1, (name, values)
        assert growth(counts, "memory") < BYTES
