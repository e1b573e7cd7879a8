"""The command line in this process: words, exit codes, and one run on a single device."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf

from lightning_pipeline import cli
from lightning_pipeline.overrides import for_training

SINGLE = [
    "strategy=single",
    "trainer=cpu",
    "trainer.max_epochs=1",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "logger=none",
    "model.widths=[4,8]",
    "model.blocks=1",
]


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder and one thread; afterwards no log handler that writes to a closed stream."""
    monkeypatch.chdir(tmp_path)
    threads, handlers = torch.get_num_threads(), logging.root.handlers[:]
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.root.handlers[:] = handlers


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    for command in (*cli.COMMANDS, cli.CONSOLIDATE, cli.BENCH, cli.DRAW):
        assert f"\n  {command}" in printed


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    known = "one of train, validate, test, predict, plan, consolidate, bench, draw, got 'trian'"
    assert known in capsys.readouterr().err


def test_composed_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "schedule=dualpipev", "--cfg", "job", "--resolve"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    assert config.strategy.schedule == "DualPipeV"
    assert config.strategy.stages_per_rank == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "stages=3"], "Set stages=2 or devices=3."),
        (["train", "schedule=dualpipev", "microbatches=3"], "Set microbatches=4"),
        (["test"], "Set checkpoint=PATH"),
    ],
)
def test_refusals_end_with_code_2_and_no_traceback(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    printed = capfd.readouterr().err
    assert caught.value.code == 2
    assert printed.startswith("lightning-pipeline: ")
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("name", ["orders.csv", "a (b)/it's.CSV"])
def test_a_file_is_a_schedule(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    assert cli.main([command, f"schedule={name}", "--cfg", "job", "--resolve"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    assert config.schedule == {"name": name, "stages_per_rank": "auto"}
    assert config.strategy.schedule == name
    assert config.strategy.pipeline_parallel_size == 2


def test_files_and_names_are_swept_together() -> None:
    Path("own.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert for_training("schedule=own.csv,gpipe,auto") == "schedule.name='own.csv','gpipe','auto'"


SHOWN = ["--cfg", "job", "--resolve"]


@pytest.mark.parametrize(
    "words",
    [
        ["draw", "schedule=bad.csv"],
        *(
            [command, f"{key}=bad.csv", *shown]
            for command in ("train", "plan")
            for key in ("schedule", "schedule.name")
            for shown in ([], SHOWN)
        ),
        ["bench", "bench=limit", "schedules=[bad.csv]"],
        ["bench", "bench=overlap", "schedules=[bad.csv]"],
        ["bench", "bench=actions", "schedules=[bad.csv]"],
        ["bench", "bench=memory", "schedules=[bad.csv]"],
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("bad.csv").write_text("0F0,0X0\n1F0,1B0\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    printed = capfd.readouterr().err
    assert caught.value.code == 2
    assert "got '0X0' in row 1, column 2" in printed
    assert printed.startswith("lightning-pipeline: ") and printed.count("\n") == 1


def test_refusal_of_the_strategy_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "schedule.name=2F2B", "strategy.pipeline_parallel_size=2"])
    assert caught.value.code == 2
    assert "got '2F2B'" in capfd.readouterr().err


def test_train_then_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, words = dict(os.environ), list(sys.argv)
    assert cli.main(["train", *SINGLE, "hydra.run.dir=first"]) == 0
    printed = capsys.readouterr().out
    assert "final validation accuracy: 0." in printed
    assert "final val_loss: " in printed
    assert "checkpoint: first/checkpoints/epoch0-val_loss" in printed
    assert (dict(os.environ), sys.argv) == (before, words)

    checkpoint = "checkpoint=first/checkpoints/last.ckpt"
    assert cli.main(["predict", *SINGLE, checkpoint, "hydra.run.dir=second"]) == 0
    assert "predictions: second/predictions_0.pt" in capsys.readouterr().out
    predictions = torch.cat(torch.load(tmp_path / "second" / "predictions_0.pt"))
    assert predictions.shape == (270,)


def test_job_file_runs_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *SINGLE, "hydra.run.dir=one", "model.learning_rate=0.01"]) == 0
    first = capsys.readouterr().out.splitlines()
    job = OmegaConf.load(tmp_path / "one" / cli.JOB_FILE)
    assert job.model.learning_rate == 0.01
    assert job.output_dir == str(tmp_path / "one")

    added_by_lightning = ["hydra.run.dir=elsewhere", "hydra.output_subdir=null"]
    assert cli.main(["train", "--job", f"one/{cli.JOB_FILE}", *added_by_lightning]) == 0
    again = capsys.readouterr().out.splitlines()
    accuracy = [line for line in first if line.startswith("final validation accuracy")]
    assert accuracy
    assert [line for line in again if line.startswith("final validation accuracy")] == accuracy
    assert not (tmp_path / "elsewhere").exists()


def test_multirun_runs_every_job_from_a_clean_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["-m", "seed=1,2", "hydra.sweep.dir=sweep"]
    assert cli.main(["train", *SINGLE, *sweep]) == 0
    assert capsys.readouterr().out.count("final validation accuracy") == 2
    seeds = [OmegaConf.load(tmp_path / "sweep" / n / cli.JOB_FILE).seed for n in "01"]
    assert seeds == [1, 2]


def test_failing_job_ends_a_multirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # That of torchmetrics 1.4.0 (pretty-errors) writes to where stderr was when it was imported.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    sweep = ["-m", "data.batch_size=-1,64", "hydra.sweep.dir=sweep"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *SINGLE, *sweep])
    assert caught.value.code == 1
    assert "batch_size should be a positive integer" in capfd.readouterr().err
    assert not (tmp_path / "sweep" / "1").exists()


def folder_of(path: Path, **own: object) -> Path:
    """A checkpoint folder, as version 1 of the format has it."""
    weight = torch.arange(3.0)
    written = {"state_dict": {"a.weight": weight}}
    dcp.save(written, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    stored = [(("state_dict", name), "state_dict.a.weight") for name in ("a.weight", "b.weight")]
    weights = {"a.weight": torch.empty(0), "b.weight": torch.empty(0)}
    default = {"version": 1, "keys": ["epoch", "state_dict"], "stored": stored}
    rest = {"epoch": 3, "lightning_pipeline": {**default, "state_dict": weights, **own}}
    torch.save(rest, path / "meta.pt")
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("words", [[], ["new/plain.ckpt"]])
def test_consolidate(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    folder_of(tmp_path / "last.ckpt")
    assert cli.main(["consolidate", "last.ckpt", *words]) == 0
    file = [*words, "last.ckpt.consolidated"][0]
    assert f"checkpoint: {file}" in capsys.readouterr().out
    checkpoint = torch.load(tmp_path / file, weights_only=True)
    assert list(checkpoint) == ["epoch", "state_dict"]
    weights = checkpoint["state_dict"]
    assert weights["a.weight"].tolist() == [0, 1, 2]
    assert weights["a.weight"].data_ptr() == weights["b.weight"].data_ptr()
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.suffix == ".part") == []


CONSOLIDATIONS = {
    "no folder": (["nowhere"], "must exist, and 'nowhere' does not"),
    "a file": (["file"], "or is a file. One file needs no consolidation."),
    "something else": (["other"], "'other' must be a checkpoint folder with the files .metadata"),
    "the file exists": (["good", "file"], "must not exist, and 'file' does. Remove it"),
    "another version": (["new"], "'new' was not written by this version of the pipeline strategy"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CONSOLIDATIONS)
def test_consolidate_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    words, message = CONSOLIDATIONS[case]
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    folder_of(tmp_path / "good")
    folder_of(tmp_path / "new", version=2)
    with pytest.raises(SystemExit) as caught:
        cli.main(["consolidate", *words])
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_help_of_consolidate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["consolidate", "--help"])
    assert caught.value.code == 0
    assert "FOLDER" in capsys.readouterr().out
