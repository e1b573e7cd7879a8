"""Nothing grows with the steps of a run."""

from __future__ import annotations

import pytest

from benchmarks.longrun import CASES, LENGTHS, growth, run

STEPS, EVERY = 240, 4
BYTES = 1000.0
"""What a step may leave in memory."""
OBJECTS = 0.02
"""What the slope of their count may be: no step leaves one, nor any validation.

The count goes up and down by some ten, which is a slope of 0.003 at most; one left by each tenth
step would be 0.1.
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_nothing_grows(case, monkeypatch):
    # torch keeps its last 2,000 messages, which takes as long to be full
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20")
    varied = case == "other shapes"
    rare = 10 if varied else 100  # validations, too, have seen all lengths in half of the run
    for counts in run(case, STEPS, EVERY, deadline=180, rare=rare):
        half = len(counts["step"]) // 2
        assert half == STEPS // EVERY // 2
        for name in ("files", "threads", "store", "shared", "recordings"):
            values = set(counts[name][half:])
            assert len(values) == 1, (name, values)
        assert growth(counts, "memory") < BYTES
        assert growth(counts, "objects") < OBJECTS
        # of training and of validation, with the count of batches that needed a new one
        assert counts["recordings"][-1] == 4 * (LENGTHS if varied else 1)
