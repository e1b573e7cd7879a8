"""The versions of torch and Lightning that this package has been tested with.

Both are used by private names too, which change without notice, so another version fails in ways
that do not speak of it. It is told before any of them is looked at.
"""

from __future__ import annotations

import os
import warnings
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

RANGES = {"torch": ">=2.13,<2.14", "lightning": ">=2.6,<2.7", "torchmetrics": ">=1.4,<2"}
"""What has to be there; ``pyproject.toml`` says the same."""

VARIABLE = "LIGHTNING_PIPELINE_ANY_VERSION"
"""Set to 1 in the environment, it lets any version be tried."""


def check_versions() -> None:
    """Refuses versions that this package cannot know.

    A build of one's own or before a release, such as ``2.13.0a0+git``, counts as the release that
    it leads to.

    Raises:
        ImportError: If one is missing or outside its range; says what is there, what to install,
            and how to try all the same.
    """
    there = {name: _version_of(name) for name in RANGES}
    wrong = {name: there[name] for name in RANGES if not _fits(there[name], RANGES[name])}
    if not wrong:
        return
    needed = ", ".join(f"{name}{RANGES[name]}" for name in wrong)
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in wrong.items())
    text = f"lightning_pipeline needs {needed}, got {found}."
    if os.environ.get(VARIABLE) == "1":
        warnings.warn(f"{text} It is tried, as {VARIABLE}=1 asks for.", stacklevel=3)
        return
    install = " ".join(f"'{name}{RANGES[name]}'" for name in wrong)
    raise ImportError(f"{text} Run: pip install {install}; or set {VARIABLE}=1 to try anyway.")


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(version: str | None, allowed: str) -> bool:
    return version is not None and Version(version).base_version in SpecifierSet(allowed)
