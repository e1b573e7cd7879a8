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
    """Cells of every row of every table on the page: feature, result, test."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    stripped = [[cell.strip() for cell in row] for row in cells]
    return [row for row in stripped if row[0] != "feature" and set(row[0]) - set(":- ")]


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
