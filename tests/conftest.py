"""One thread a process: the tests run several processes on few cores."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
