"""One thread a process: the tests run several processes on few cores."""

from __future__ import annotations

import os

import hypothesis

os.environ["OMP_NUM_THREADS"] = "1"

# The same examples in every run, and no files left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")
