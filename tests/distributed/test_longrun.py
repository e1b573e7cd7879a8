"""Nothing grows with the steps of a run."""

from __future__ import annotations

import pytest

from benchmarks.longrun import growth, run

STEPS, EVERY = 240, 4
BYTES = 1000.0
"""What a step may leave in memory."""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["plain", "interleaved"])
def test_nothing_grows(case, monkeypatch):
    # torch keeps its last 2,000 messages, which takes as long to be full
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20")
    for counts in run(case, STEPS, EVERY, deadline=180):
        half = len(counts["step"]) // 2
        assert half == STEPS // EVERY // 2
        for name in ("files", "threads", "store", "shared", "recordings"):
            values = set(counts[name][half:])
            assert len(values) == 1, (name, values)
        assert growth(counts, "memory") < BYTES
