"""``lightning-pipeline plan``: its tables, its data for programs, its refusals."""

from __future__ import annotations

import json
import shlex
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import cli
from lightning_pipeline.planning import measuring, searching
from lightning_pipeline.planning.command import run_plan
from lightning_pipeline.schedules import SCHEDULES, get_schedule

SMALL = ["experiment=gpt", "device=h100", "devices=4", "data.num_characters=20000"]


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str
) -> tuple[int, str, str]:
    monkeypatch.chdir(folder)
    try:
        code = cli.main(["plan", *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_the_plan_the_ranking_and_the_overrides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = run(capsys, monkeypatch, tmp_path, *SMALL)
    assert code == 0
    assert "predicted bubble" in out and "partition=" in out
    assert "memory of each rank of a pipeline" in out
    assert "fits one device: strategy=ddp needs no pipeline" in out
    [line] = [line for line in out.splitlines() if line.startswith("lightning-pipeline train ")]
    with initialize_config_module("lightning_pipeline.conf", version_base="1.3"):
        cfg = compose("train", overrides=["output_dir=out", *line.split()[2:]])
        settled = cli.settle("train", cfg)
    assert settled.strategy.pipeline_parallel_size * settled.strategy.data_parallel_size == 4
    assert "experiment=gpt data.num_characters=20000" in line
    assert not {"device=h100", "memory", "schedule=auto"} & set(line.split())
    header = next(i for i, text in enumerate(out.splitlines()) if text.startswith("schedule  "))
    first = out.splitlines()[header + 1].split()
    assert get_schedule(first[0]).name == get_schedule(settled.strategy.schedule).name


def test_data_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = run(capsys, monkeypatch, tmp_path, *SMALL, "json=true", "memory=2.03GB")
    assert code == 0
    data = json.loads(out)
    assert data["limit"] == pytest.approx(2.03e9, rel=1e-12)
    speeds = [found["samples_per_second"] for found in data["fitting"]]
    # What differs by less than a millionth counts as equally fast.
    assert all(a >= b * (1 - 2e-6) for a, b in pairwise(speeds)) and len(speeds) > 10
    assert all(found["peak_bytes"] <= data["limit"] for found in data["fitting"])
    assert all(found["peak_bytes"] > data["limit"] for found in data["too_large"])
    names = {entry.name for entry in SCHEDULES}
    assert {found["schedule"] for found in data["fitting"]} <= names
    assert sum(stage["share"] for stage in data["stages"]) == pytest.approx(1)


def test_what_is_given_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["schedule=Interleaved1F1B", "stages=8", "microbatches=8", "json=true"]
    code, out, _ = run(
        capsys, monkeypatch, tmp_path, *SMALL, *given, "activation_checkpointing=full"
    )
    assert code == 0
    for found in json.loads(out)["fitting"]:
        assert found["schedule"] == "Interleaved1F1B"
        assert found["ranks"] * found["stages_per_rank"] == 8
        assert found["microbatches"] == 8 and found["activation_checkpointing"] == "full"


def test_a_file_is_planned_with_its_own_microbatches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "a (b).csv"
    (tmp_path / name).write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    code, out, _ = run(capsys, monkeypatch, tmp_path, *SMALL, f"schedule={name}")
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("lightning-pipeline train ")]
    words = shlex.split(line)
    assert {f"schedule={name}", "devices=4", "stages=2", "microbatches=3"} <= set(words)
    assert not any(word.startswith("schedule.name") for word in words)
    assert f"\n{name} " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory=much"], "memory must be a size in bytes, got 'much'"),
        (["devices=1"], "A pipeline needs at least 2 devices, got 1"),
        (["stages=7"], "got 7. The number comes from stages=7. Set stages=4 or stages=8"),
        (["memory=2.001GB"], "needs devices of 2.0"),
        (["activation_checkpointing=ful"], "got 'ful'"),
        (["activation_checkpointing=[torch.nn.Linear]"], "A plan recomputes stages, got"),
        (["microbatches=17"], "the batch has 16. Set microbatches=8 or microbatches=16"),
        (["top=0"], "top must be an integer of at least 1, got 0"),
        (["strategy.balance_by=time"], "on this machine, got device=h100"),
        (["order=mine.txt"], "got order=mine.txt with schedule=auto. Set order=order.csv"),
        (["order=mine.csv", "schedule=gpipe"], "with schedule=GPipe. Set order=order.csv"),
    ],
)
def test_refusals_name_the_cure(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    code, out, err = run(capsys, monkeypatch, tmp_path, *SMALL, *words)
    assert code == 2 and out == ""
    assert message in err


class Llama(L.LightningModule):
    """A model of the shape of Llama 3 70B, with random weights that nobody makes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.net = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=8192,
                intermediate_size=28672,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
                vocab_size=128256,
                max_position_embeddings=8192,
            )
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(input_ids=batch[0], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Tokens(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.zeros(64, 4096, dtype=torch.long)
        return DataLoader(TensorDataset(tokens, tokens), batch_size=64)


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_in_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    with initialize_config_module("lightning_pipeline.conf", version_base="1.3"):
        overrides = ["device=h100", "devices=16", "trainer.precision=bf16-true", "json=true"]
        cfg = compose("plan", overrides=overrides)
    parts: dict[int, Any] = {id(cfg.model): Llama, id(cfg.data): Tokens}

    def build(node: DictConfig) -> Any:
        return parts[id(node)]()

    start = time.process_time()
    run_plan(cfg, build)
    assert time.process_time() - start < 60
    data = json.loads(capsys.readouterr().out)
    assert data["fitting"]
    assert sum(stage["parameters"] for stage in data["stages"]) == 70_553_706_496


def test_the_command_is_for_the_devices_of_a_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = run(
        capsys, monkeypatch, tmp_path, *SMALL[:2], "devices=2", "trainer.num_nodes=2"
    )
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("lightning-pipeline train ")]
    assert {"devices=2", "trainer.num_nodes=2"} <= set(line.split())


@pytest.mark.parametrize(
    ("word", "cure"),
    [("memory=80", "e.g. memory=80GB"), ("strategy=ddp", "set strategy=pipeline")],
)
def test_words_that_cannot_be_meant(
    word: str,
    cure: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    code, _, err = run(capsys, monkeypatch, tmp_path, *SMALL, word)
    assert code == 2
    assert cure in err


def test_an_order_is_searched_and_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(searching, "_GAIN", -1.0)
    monkeypatch.setattr(searching.Prediction, "samples_per_second", property(_preferred))
    words = ["stages=4", "microbatches=4", "activation_checkpointing=none", "order=mine.csv"]
    code, out, _ = run(capsys, monkeypatch, tmp_path, *SMALL, *words)
    assert code == 0
    assert get_schedule(str(tmp_path / "mine.csv")).sizes is not None
    assert out.startswith("mine.csv: 4 stages") and "The order in mine.csv takes" in out
    [line] = [line for line in out.splitlines() if line.startswith("lightning-pipeline train ")]
    assert "schedule=mine.csv" in line and "order=" not in line
    code, _, err = run(capsys, monkeypatch, tmp_path, *SMALL, *words[:3], "order=mine.csv/mine.csv")
    assert code == 2 and "The order's file must be writable" in err


def _preferred(found: searching.Prediction) -> float:
    """Its own speed, and more for what was searched."""
    return (1 + found.candidate.schedule.name.endswith("mine.csv")) / found.seconds_per_sample


def test_an_order_that_gains_nothing_is_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["stages=2", "microbatches=1", "order=mine.csv"]
    code, out, _ = run(capsys, monkeypatch, tmp_path, *SMALL, *words)
    assert code == 0 and not (tmp_path / "mine.csv").exists()
    assert "by 1 %: mine.csv is not written" in out


def test_times_of_this_machine_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    run_all = measuring.measure

    def measure(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return run_all(*args, **kwargs)

    monkeypatch.setattr(measuring, "measure", measure)
    words = ["experiment=gpt", "devices=2", "data.num_characters=20000", "schedule=gpipe"]
    code, out, _ = run(capsys, monkeypatch, tmp_path, *words, "strategy.balance_by=time")
    assert code == 0 and len(asked) == 2
    assert "strategy.balance_by=time" in out


def test_more_devices_than_a_node_has_are_put_on_nodes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["devices=16", "schedule=gpipe", "stages=2"]
    code, out, _ = run(capsys, monkeypatch, tmp_path, *SMALL[:2], *words)
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("lightning-pipeline train ")]
    assert {"devices=8", "trainer.num_nodes=2"} <= set(line.split())
