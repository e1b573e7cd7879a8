"""Other versions of torch and Lightning are told at import, before they fail by themselves."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import lightning_pipeline
from lightning_pipeline import versions

ROOT = Path(__file__).parents[2]
GOOD = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "torchmetrics": "1.9.0"}


def _there(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    found = {**GOOD, **changed}

    def version(name: str) -> str:
        if found[name] is None:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)


def test_the_ranges_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, allowed in versions.RANGES.items():
        (declared,) = re.findall(rf'^    "{name}([<>=~!].*)",$', text, re.MULTILINE)
        assert SpecifierSet(allowed) == SpecifierSet(declared), name


def test_the_oldest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    pins = re.findall(r"^([\w-]+)==(.+)$", (ROOT / "tests/oldest.txt").read_text(), re.MULTILINE)
    assert {name for name, _ in pins} > set(versions.RANGES)
    for name, version in pins:
        (oldest,) = re.findall(rf'^    "{name}>=([\d.]+)[",]', text, re.MULTILINE)
        assert Version(oldest) == Version(version), name


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.13.0"),
        ("torch", "2.13.1+cu130"),
        ("torch", "2.13.0a0+git1a2b3c4"),
        ("torch", "2.13.0.dev20260601+cpu"),
        ("torch", "2.13.0rc2"),
        ("lightning", "2.6.0.post0"),
        ("lightning", "2.6.0.dev20251101"),
        ("torchmetrics", "1.4.0"),
    ],
)
def test_builds_of_a_known_release_are_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    _there(monkeypatch, **{name: version})
    versions.check_versions()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.12.1+cpu"),
        ("torch", "2.14.0"),
        ("torch", "2.14.0a0+git1a2b3c4"),
        ("torch", "2.14.0.dev20261101+cpu"),
        ("torch", "3.0"),
        ("lightning", "2.5.6"),
        ("lightning", "2.7.0rc1"),
        ("torchmetrics", "1.3.2"),
        ("torchmetrics", "2.0.0"),
    ],
)
def test_another_release_is_told(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    _there(monkeypatch, **{name: version})
    needed = f"{name}{versions.RANGES[name]}"
    with pytest.raises(ImportError) as caught:
        versions.check_versions()
    assert str(caught.value) == (
        f"lightning_pipeline needs {needed}, got {name} {version}. Run: pip install '{needed}'; "
        "or set LIGHTNING_PIPELINE_ANY_VERSION=1 to try anyway."
    )


def test_all_that_is_wrong_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _there(monkeypatch, torch="2.9.0", lightning=None)
    with pytest.raises(ImportError) as caught:
        versions.check_versions()
    assert str(caught.value) == (
        "lightning_pipeline needs torch>=2.13,<2.14, lightning>=2.6,<2.7, got torch 2.9.0, "
        "lightning missing. Run: pip install 'torch>=2.13,<2.14' 'lightning>=2.6,<2.7'; "
        "or set LIGHTNING_PIPELINE_ANY_VERSION=1 to try anyway."
    )


def test_the_environment_may_ask_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    _there(monkeypatch, torch="2.14.0")
    monkeypatch.setenv(versions.VARIABLE, "1")
    with pytest.warns(UserWarning, match=r"needs torch>=2.13,<2.14, got torch 2.14.0\. It is"):
        versions.check_versions()
    monkeypatch.setenv(versions.VARIABLE, "0")
    with pytest.raises(ImportError):
        versions.check_versions()


def test_it_is_told_before_anything_else_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    _there(monkeypatch, torch="2.11.0")
    for name in [*sys.modules]:
        if name.partition(".")[0] in versions.RANGES:
            monkeypatch.setitem(sys.modules, name, None)  # an import of it is an error
        elif name.startswith("lightning_pipeline."):
            monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location("again", lightning_pipeline.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"needs torch>=2.13,<2.14, got torch 2\.11\.0\."):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
