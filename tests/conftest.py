"""One thread a process, and a quick run that leaves some of many cases to a slow one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest

os.environ["OMP_NUM_THREADS"] = "1"

# The same examples in every run, and no files left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")

_SLOW = ("tests/distributed/", "tests/unit/test_splitting_zoo.py")
_FEW = 2
"""Cases of one test function that a quick run takes all."""

_SHARE = 0.08
"""Share of the cases that a quick run takes where there are more."""

_GOLDEN = 0.6180339887498949


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("all", "quick", "rest"),
        default="all",
        help="quick: not what is marked slow, and a part of the cases of each large table; rest: "
        "what quick leaves out",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("--cases")
    if asked == "all":
        return
    quick = set(_quick(items))
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kept[(item in quick) == (asked == "quick")].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


def _quick(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """What a quick run takes: the same each time, and of a table all over its rows and columns.

    The multiples of the golden ratio fall evenly between 0 and 1, at any stretch and stride.
    """

    def table(item: pytest.Item) -> str:
        return item.nodeid.partition("[")[0]

    sizes, seen = Counter(map(table, items)), Counter[str]()
    for item in items:
        name = table(item)
        number, seen[name] = seen[name], seen[name] + 1
        many = name.startswith(_SLOW) and sizes[name] > _FEW
        if item.get_closest_marker("slow") is None and (not many or number * _GOLDEN % 1 < _SHARE):
            yield item
