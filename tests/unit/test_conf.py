"""Every file of conf/ composes and builds, and what pyproject.toml packs is what there is."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import get_class, get_method
from omegaconf import DictConfig, OmegaConf

from lightning_pipeline import cli
from lightning_pipeline.schedules import AUTO, SCHEDULES, get_schedule

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
BENCHMARKS = sorted(path.stem for path in CONF.glob("bench/*.yaml"))
CHOICES = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("bench", "device")
)
DEVICES = sorted(path.stem for path in CONF.glob("device/*.yaml"))
EXPERIMENTS = [name for group, name in CHOICES if group == "experiment"]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_module("lightning_pipeline.conf", version_base="1.3"):
        yield


def settled(*overrides: str, command: str = "train") -> DictConfig:
    """The configuration of a run with overrides, as the command line would use it."""
    cfg = compose("train", overrides=["output_dir=out", *overrides])
    return cli.settle(command, cfg)


def targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_and_names_things_that_exist(group: str, name: str) -> None:
    config = OmegaConf.to_container(settled(f"{group}={name}"))
    found = list(targets(config))
    assert len(found) >= 3
    for target in found:
        assert isinstance(get_class(target), type)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_headed_by_their_command(name: str) -> None:
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[:2] == [
        "# @package _global_",
        f"# lightning-pipeline train experiment={name}",
    ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_name_all_arguments_and_are_headed_by_their_command(name: str) -> None:
    lines = (CONF / "bench" / f"{name}.yaml").read_text().splitlines()
    assert lines[:2] == ["# @package _global_", f"# lightning-pipeline bench bench={name}"]
    target, *arguments = compose("bench", overrides=[f"bench={name}"]).items()
    function = inspect.signature(get_method(target[1]))
    assert dict(arguments).keys() == function.parameters.keys()


def test_every_experiment_has_its_row_in_the_docs() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_experiments_advise_for_gpus_composes(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text().replace("\n# ", " ")
    [advice] = re.findall(r" On GPUs: (.*)", text)
    overrides = [word.strip(",;.)") for word in advice.split() if "=" in word]
    assert "trainer=gpu" in overrides
    assert settled(f"experiment={name}", *overrides).trainer.precision == "bf16-mixed"


def test_schedule_group_is_the_table_of_schedules() -> None:
    files = {name for group, name in CHOICES if group == "schedule"}
    assert files == {AUTO, *(entry.snake for entry in SCHEDULES)}


@pytest.mark.parametrize("name", DEVICES)
def test_plans_take_every_device(name: str) -> None:
    cfg = compose("plan", overrides=[f"device={name}", "experiment=gpt"])
    assert cfg.device.name == name and cfg.schedule.name == AUTO
    assert cfg.model._target_.endswith("GPT") and cfg.trainer.max_epochs == 3


def test_an_open_schedule_leaves_its_stages_open() -> None:
    node = settled("schedule=auto", "devices=4").strategy
    names = ("pipeline_parallel_size", "data_parallel_size", "stages_per_rank", "schedule")
    assert [node[name] for name in names] == [4, 1, AUTO, AUTO]
    shorter = ["strategy.pipeline_parallel_size=2", "strategy.data_parallel_size=auto"]
    assert settled("schedule=auto", "devices=4", *shorter).strategy.pipeline_parallel_size == 2
    with pytest.raises(ValueError, match=r"schedule=auto chooses the stages.*stages=4"):
        settled("schedule=auto", "stages=4", "devices=4")


@pytest.mark.parametrize("snake", [entry.snake for entry in SCHEDULES])
def test_schedule_files_name_their_schedule(snake: str) -> None:
    leaf = OmegaConf.load(CONF / "schedule" / f"{snake}.yaml")
    assert leaf == {"name": get_schedule(snake).name, "stages_per_rank": "auto"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (2, 1, 1, "1F1B", "auto")),
        (["schedule=interleaved_zero_bubble"], (2, 1, 2, "InterleavedZeroBubble", "auto")),
        (["devices=8", "stages=4", "microbatches=8"], (4, 2, 1, "1F1B", 8)),
        (["trainer.num_nodes=2", "schedule=gpipe"], (4, 1, 1, "GPipe", "auto")),
    ],
)
def test_top_of_the_configuration_decides_the_strategy(
    overrides: list[str], expected: tuple[object, ...]
) -> None:
    node = settled(*overrides).strategy
    assert node._target_ == "lightning_pipeline.PipelineStrategy"
    names = ("pipeline_parallel_size", "data_parallel_size", "stages_per_rank", "schedule")
    assert tuple(node[name] for name in (*names, "num_microbatches")) == expected


@pytest.mark.parametrize(
    ("strategy", "trainer_devices", "value"), [("ddp", 2, "ddp"), ("single", 1, "auto")]
)
def test_other_strategies_ignore_the_layout(
    strategy: str, trainer_devices: int, value: str
) -> None:
    config = settled(f"strategy={strategy}", "stages=7", "devices=2")
    assert (config.trainer.devices, config.strategy) == (trainer_devices, value)


@pytest.mark.parametrize(
    ("command", "overrides", "parts"),
    [
        ("train", ["stages=3"], ["3 stages fill 3 ranks", "stages=3, devices=2", "Set stages=2"]),
        ("test", [], ["needs a checkpoint", "checkpoint=null", "Set checkpoint=PATH"]),
        ("train", ["checkpoint=no.ckpt"], ["must exist", "checkpoint=no.ckpt", "that exists"]),
    ],
)
def test_refusals_name_rule_origin_and_cure(
    command: str, overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        settled(*overrides, command=command)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_packed() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent for path in (ROOT / "lightning_pipeline").rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in folders}
    names |= {"lightning_pipeline.conf", "lightning_pipeline.examples"}
    assert set(project["tool"]["setuptools"]["packages"]) == names
