"""timm beside any build of torch.

timm imports torchvision for its transforms, which no model needs. PyPI's torchvision does not load
beside a CPU build of torch, and a broken one would stop torchmetrics and Lightning, so it is not
installed with the tests; timm gets names without content in its place, for its import alone.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Names(type):
    """Of a class in which every name is the name itself: enough for an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    """A module in which every name is a class without content."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _Finder:
    """Finds torchvision and all that is in it, empty."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing is in it."""


def import_timm() -> ModuleType:
    """timm, with torchvision if there is one."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    sys.meta_path.append(_Finder)  # type: ignore[arg-type]
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(_Finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
