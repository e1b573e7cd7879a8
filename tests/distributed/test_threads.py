"""The threads of gloo serve those that compute."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.schedules import get_schedule
from tests.distributed.ranks import run_ranks


def policies(name):
    tasks = [task for task in Path("/proc/self/task").iterdir()]
    return [
        os.sched_getscheduler(int(task.name))
        for task in tasks
        if (task / "comm").read_text().strip() == name
    ]


def on_rank():
    before = policies("gloo_tcp_loop")
    Mesh(MeshSizes(2, 1), get_schedule("1F1B"), dist.get_rank()).build_groups(timedelta(seconds=20))
    return before, policies("gloo_tcp_loop"), os.sched_getscheduler(0)


def test_the_loops_of_all_groups_are_batch_threads_and_the_rank_is_not():
    for before, after, own in run_ranks(2, on_rank):
        assert len(after) > len(before), "a group has a loop of its own"
        assert set(after) == {os.SCHED_BATCH}
        assert own == os.SCHED_OTHER
