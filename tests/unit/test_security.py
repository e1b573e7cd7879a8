"""Nothing that is read runs as code: no eval, no pickle, no loader that would."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_pipeline

PACKAGE = Path(lightning_pipeline.__file__).parent

RUNS_CODE = {
    "eval": set[str](),
    # Of a program that the package itself has made of a recording.
    "exec": {"splitting/stage.py"},
    "__import__": set[str](),
    "pickle.load": set[str](),
    "pickle.loads": set[str](),
    "yaml.load": set[str](),
    "os.system": set[str](),
}
"""Calls that run what they are given, and the files that may."""


WEIGHTS_ONLY = {
    "bench/ranks.py": "False",  # what a child has written for its parent
    "messages.py": "False",  # what another rank of the job has sent
    "sharded.py": "weights_only",  # the user's, as in Trainer.fit; None is torch's True
    "weights.py": "weights_only",
}
"""The files that ask torch.load for something else than ``weights_only=True``."""


def _calls(code: str) -> Iterator[tuple[int, str, dict[str | None, str]]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            yield node.lineno, ast.unparse(node.func), keywords


def _dangers(file: str, code: str) -> list[str]:
    found = []
    for line, name, keywords in _calls(code):
        if file not in RUNS_CODE.get(name, {file}) or keywords.get("shell") == "True":
            found.append(f"{file}:{line} {name}")
        allowed = {"True", WEIGHTS_ONLY.get(file, "True")}
        if name == "torch.load" and keywords.get("weights_only") not in allowed:
            found.append(f"{file}:{line} torch.load without weights_only=True")
    return found


def test_nothing_that_is_read_runs_as_code() -> None:
    files = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}
    assert [danger for file, code in files.items() for danger in _dangers(file, code)] == []


@pytest.mark.parametrize(
    "code",
    [
        "eval(cfg.loss)",
        "exec(text)",
        "pickle.loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_a_new_danger_is_found(code: str) -> None:
    assert len(_dangers("new.py", code)) == 1
