"""What the README says is what the code does."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from lightning_pipeline import cli
from lightning_pipeline.actions import action_lists
from lightning_pipeline.schedules import SCHEDULES, get_schedule
from lightning_pipeline.simulate import StageTime, simulate

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = re.findall(r"^lightning-pipeline (.+)$", README, re.MULTILINE)
ROWS = {
    cells[0]: cells[1:]
    for line in README.splitlines()
    if line.startswith("| ") and "%" in line
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_every_schedule_has_a_row() -> None:
    assert list(ROWS) == [entry.name for entry in SCHEDULES]


@pytest.mark.parametrize("name", ROWS)
def test_schedule_table_is_what_the_simulation_says(name: str) -> None:
    schedule, ranks = get_schedule(name), 4
    depth = schedule.default_stages_per_rank
    lists = action_lists(schedule, ranks, depth, microbatches=16)
    timeline = simulate(lists, [StageTime(1, 1, 1)] * (ranks * depth))
    placed = ", as a V" if schedule.placement == "v" else ""
    assert ROWS[name][:3] == [
        f"{depth}{placed}",
        f"{100 * timeline.bubble:.1f} %",
        f"{max(timeline.peak_activations) / depth:g}",
    ]


def jobs(overrides: list[str]) -> list[tuple[str, ...]]:
    """The overrides of each job: one for every choice among values parted by commas."""
    keys = [text.partition("=") for text in overrides if text != "--multirun"]
    return list(product(*([f"{key}={v}" for v in values.split(",")] for key, _, values in keys)))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str, tmp_path: Path) -> None:
    word, *overrides = shlex.split(command.replace("PATH", str(tmp_path)), comments=True)
    assert word in (*cli.COMMANDS, cli.CONSOLIDATE, cli.DRAW)
    if word == cli.CONSOLIDATE:  # has no configuration
        return
    if word == cli.DRAW:
        assert cli.main([word, *overrides]) == 0
        return
    with initialize_config_module("lightning_pipeline.conf", version_base="1.3"):
        for job in jobs(overrides):
            assert cli.settle(word, compose("train", overrides=["output_dir=out", *job]))
