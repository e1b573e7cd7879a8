"""docs/models.md says of every model of the zoo what the tests show."""

from __future__ import annotations

import pytest

from tests.models.page import PAGE, row, table
from tests.models.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_has_a_row(name: str) -> None:
    lines = PAGE.read_text().splitlines()
    assert row(name, ZOO[name]) in lines, "python -m tests.models.page writes it"


def test_has_no_other_rows() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [line for line in table() if line.startswith("| `")]
