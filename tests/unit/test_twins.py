"""Which weights are averaged copies of which."""

from __future__ import annotations

import difflib
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_pipeline.steps import twins
from lightning_pipeline.steps.twins import find_twins


class Copies(L.LightningModule):
    """Trained layers and frozen copies of them, beside one that is no copy."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.online = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        self.target = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        self.target.append(nn.Linear(2, 3))
        self.target.requires_grad_(False)


def survey_of(module: L.LightningModule) -> Any:
    names = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
    return SimpleNamespace(calls=[], used=names)


@pytest.mark.parametrize("count", [3, 100])
def test_copies_belong_to_the_layers_of_their_names(count: int) -> None:
    module = Copies(count)
    assert find_twins(module, survey_of(module)) == {
        f"target.{index}.{key}": f"online.{index}.{key}"
        for index in range(count)
        for key in ("weight", "bias")
    }


class Frozen(L.LightningModule):
    """A net whose first half is frozen."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])
        for layer in list(self.net)[: count // 2]:
            layer.requires_grad_(False)


@pytest.mark.parametrize("kind", [Copies, Frozen])
def test_names_are_compared_a_bounded_number_of_times(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    class Counted(difflib.SequenceMatcher[str]):
        def ratio(self) -> float:
            nonlocal compared
            compared += 1
            return super().ratio()

    monkeypatch.setattr(twins.difflib, "SequenceMatcher", Counted)
    module = kind(200)
    found = find_twins(module, survey_of(module))
    assert found and 0 < compared <= twins._COMPARED * 200
    if kind is Copies:  # one name ends alike
        assert compared == 200
