"""`lightning-pipeline draw`: words, files and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_pipeline import cli
from lightning_pipeline.draw import page
from lightning_pipeline.draw.command import draw
from lightning_pipeline.schedules import SCHEDULES


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    left = {path.suffix.lower() for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {".svg", ".png", ".html", ".txt"}, "a picture leaves nothing else behind"


def test_configuration_has_the_arguments_and_their_defaults() -> None:
    with initialize_config_module("lightning_pipeline.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose("draw"))
    defaults = {name: p.default for name, p in inspect.signature(draw).parameters.items()}
    assert config == {"_target_": "lightning_pipeline.draw.command.draw", **defaults}


@pytest.mark.parametrize(
    ("word", "size"),
    [("schedule=1f1b", "stages=2"), ("schedule=1F1B", "ranks=2"), ("schedules=[1f1b]", "ranks=2")],
)
def test_grid_in_the_terminal(word: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw", word, size, "microbatches=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1F1B",
        "rank 0  0F0 0F1 ... ... 0B0---- ... 0B1----",
        "rank 1  ... 1F0 1B0---- 1F1 1B1---- ... ...",
        "bubble 33.3 %, step 9, peak activations 2 1",
    ]


def test_times(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["forward=2", "backward_input=1.5", "backward_weight=0.5", "message=0.25"]
    assert cli.main(["draw", "schedule=gpipe", "ranks=2", "microbatches=auto", *times]) == 0
    # Forwards, then backwards: 9 each, and a message before the first and behind the last.
    assert "step 36.5," in capsys.readouterr().out


def test_messages_pass_a_link_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule=gpipe", "ranks=2", "microbatches=2", "message=0.25", "transfer=3"]
    assert cli.main(["draw", *words]) == 0
    # The second output waits for the first until 4 and is there at 7.25, its gradient at 16.5.
    assert "step 18.5," in capsys.readouterr().out


def test_file_brings_its_own_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    for words in (["schedule=own.csv"], ["schedule=own.csv", "microbatches=auto"]):
        assert cli.main(["draw", *words]) == 0
        assert capsys.readouterr().out.splitlines()[1:3] == [
            "rank 0  0F0 ... ... ... 0B0---- 0F1 ... ... ... 0B1----",
            "rank 1  ... 1F0 1B0---- ... ... ... 1F1 1B1---- ... ...",
        ]
    Path("a (b), c.csv").write_text(Path("own.csv").read_text())
    assert cli.main(["draw", "schedule=a (b), c.csv"]) == 0
    assert capsys.readouterr().out.startswith("a (b), c.csv\nrank 0  0F0")
    Path("a (b), c.csv").unlink()
    with pytest.raises(SystemExit):
        cli.main(["draw", "schedule=own.csv", "microbatches=3"])
    assert "microbatches=2" in capsys.readouterr().err
    Path("own.csv").unlink()


def test_all_schedules_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw"]) == 0
    blocks = capsys.readouterr().out.rstrip().split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [entry.name for entry in SCHEDULES]


def test_stages_are_those_of_the_whole_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule=[1f1b,zbv_zero_bubble]", "stages=4", "format=svg"]
    assert cli.main(["draw", *words]) == 0
    root = ElementTree.fromstring(capsys.readouterr().out)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "One step of the same model: 2 or 4 ranks, 8 microbatches" in texts
    rows = [node for node in root.iter() if node.get("class") == "note" and node.get("x") == "20"]
    assert [row.text for row in rows] == ["0", "1", "2", "3", "0", "1"]


@pytest.mark.parametrize(
    ("output", "start"),
    [
        ("a/b.svg", b"<svg"),
        ("b.PNG", b"\x89PNG"),
        ("b.html", b"<!doctype html>"),
        ("b.txt", b"1F1B\nrank 0"),
    ],
)
def test_ending_decides_the_format(
    output: str,
    start: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(page.draw_page, "__defaults__", ((2, 4), (4, 8)))
    assert cli.main(["draw", "schedule=1f1b", f"output={output}"]) == 0
    assert capsys.readouterr().out == f"picture: {output}\n"
    assert Path(output).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["schedule=2f2b"], ["must be one of GPipe", "got '2f2b'"]),
        (["schedule=[]"], ["must be a schedule", "schedule=[]", "Set schedule=all"]),
        (["format=gif"], ["one of text, svg, png, html", "'gif'", "format=gif", "format=svg"]),
        (["output=a.pdf"], ["one of text, svg, png, html", "'pdf'", "output=a.pdf"]),
        (["format=png"], ["needs a file", "output=null", "Set output="]),
        (["schedule=dualpipev", "microbatches=3"], ["needs 8", "microbatches=3", "Set microb"]),
        (["schedule=dualpipev", "stages=5"], ["multiple of 2", "stages=5", "Set stages=6"]),
        (["schedule=1f1b", "stages_per_rank=2"], ["exactly 1", "got 2", "stages_per_rank=1"]),
        (["schedule=1f1b", "ranks=0"], ["ranks must be an integer", "got 0"]),
        (["forward=-1"], ["forward must be", "got -1", "Set forward=1"]),
        (
            ["stages=4", "output=a.html"],
            ["one number of ranks", "[2, 4] and [8]", "stages=null, ranks=4 and microbatches=8"],
        ),
        (["schedule=none.csv"], ["must be readable", "none.csv"]),
        (["transfer=-1"], ["transfer must be a time from 0 to 1e+12, got -1"]),
        (["forward=1e307"], ["forward must be a time from 0 to 1e+12, got 1e+307"]),
    ],
)
def test_refusals(words: list[str], parts: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["draw", *words])
    assert caught.value.code == 2
    printed = capfd.readouterr().err
    assert printed.startswith("lightning-pipeline: ") and "Traceback" not in printed
    for part in parts:
        assert part in printed
