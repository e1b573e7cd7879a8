"""Nothing grows with the steps of a run."""

from __future__ import annotations

import pytest

from benchmarks.longrun import CASES, LENGTHS, growth, run

STEPS = 240
EVERY, RARE = 4, 10
BYTES = 1000.0
"""What a step may leave in memory."""
OBJECTS = 0.02
"""What the slope of the count may be: no step, validation or checkpoint leaves one.

The count goes up and down by some five objects, which is a slope of 0.003 at most. One left by each
tenth step would be 0.1.
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_nothing_grows(case, monkeypatch):
    # torch keeps its last 2,000 messages, which takes as long to be full
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20")
    for counts in run(case, STEPS, EVERY, deadline=180, rare=RARE):
        half = len(counts["step"]) // 2
        assert half == STEPS // EVERY // 2
        for name in ("files", "threads", "store", "shared", "recordings"):
            values = set(counts[name][half:])
            assert len(values) == 1, (name, values)
        assert growth(counts, "memory") < BYTES
        assert growth(counts, "objects") < OBJECTS
        # training and validation, and what is known of the signatures of each
        lengths = LENGTHS if case == "other shapes" else 1
        assert counts["recordings"][-1] == 4 * lengths
