"""docs/trainer.md: every argument of the Trainer and every callback has a row with its test."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch import callbacks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainer.md"


@functools.cache
def rows() -> list[list[str]]:
    """Cells of every row of every table of features on the page: feature, result, test."""
    found, is_features = [], False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            is_features = False
            continue
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        if row == ["feature", "result", "test"]:
            is_features = True
        elif is_features and set(row[0]) - set(":- "):
            found.append(row)
    return found


@functools.cache
def functions_of(file: str) -> set[str]:
    [path] = (ROOT / "tests").rglob(file)
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def names(text: str) -> set[str]:
    """Everything that stands in backticks, without what follows an equals sign or a bracket."""
    quoted = re.findall(r"`([^`]+)`", text)
    return {
        word for part in quoted for word in re.findall(r"[A-Za-z_]\w*", re.split("[=(]", part)[0])
    }


ARGUMENTS = [name for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"]


@pytest.mark.parametrize("feature", [*ARGUMENTS, *callbacks.__all__])
def test_has_a_row(feature):
    assert any(feature in names(row[0]) for row in rows())


def test_rows_have_a_result_and_a_test_that_exists():
    assert rows()
    for row in rows():
        assert len(row) == 3, row
        feature, result, test = row
        assert re.match("same|refused: .", result), row
        found = re.findall(r"(test_\w+\.py)::(test_\w+)", test)
        assert found, row
        for file, name in found:
            assert name in functions_of(file), f"{feature}: there is no {name} in {file}"
