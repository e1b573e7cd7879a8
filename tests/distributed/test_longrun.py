"""Nothing grows with the steps of a run."""

from __future__ import annotations

import pytest

from benchmarks.longrun import CASES, growth, run

STEPS, EVERY, WARM = 240, 4, 120
BYTES = 1000.0
"""A step may leave so many; what a warm process takes beyond that is found by `benchmarks.longrun`,
which has more steps."""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_nothing_grows(case):
    for counts in run(case, STEPS, EVERY, deadline=180):
        late = [index for index, step in enumerate(counts["step"]) if step >= WARM]
        for name in ("files", "threads", "store", "shared"):
            values = {counts[name][index] for index in late}
            assert len(values) == 1, (name, values)
        assert growth(counts, "memory") < BYTES
