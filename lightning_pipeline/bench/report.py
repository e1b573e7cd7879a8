"""What a benchmark found, with the command and the machine that it was found on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lightning import __version__ as lightning_version


def machine() -> dict[str, Any]:
    """Cores, CPU, memory, versions and the load of this machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning_version,
        "load": list(os.getloadavg()),
    }


def _field(path: str, name: str) -> str:
    """The first value of ``name`` in a file of lines ``name: value``."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


@dataclass
class Report:
    """Rows of one benchmark.

    Attributes:
        name: Name of the benchmark.
        title: One sentence that says what a row is.
        settings: What was asked for.
        columns: Keys of a row that its table shows, with their headings.
        rows: What was found; values are numbers, texts, or lists and dicts of them.
    """

    name: str
    title: str
    settings: dict[str, Any]
    columns: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)
    command: str = field(default_factory=lambda: _command(sys.argv))
    begun: str = field(default_factory=lambda: _date())

    def add(self, **row: Any) -> None:
        """Adds a row and prints it."""
        if not self.rows:
            print("\n".join(self._head()), flush=True)
        self.rows.append(row)
        print(self._line(row), flush=True)

    def table(self) -> str:
        """The rows as a table in Markdown, with command and machine."""
        found = self.machine
        load = " ".join(f"{number:.2f}" for number in found["load"])
        lines = [
            f"{self.title}",
            "",
            f"`{self.command}`, {self.begun}, {found['cores']} cores of {found['cpu']}, "
            f"torch {found['torch']}, lightning {found['lightning']}, load {load}",
            "",
            *self._head(),
            *map(self._line, self.rows),
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Writes ``results.json`` and ``table.md``."""
        folder.mkdir(parents=True, exist_ok=True)
        names = ("name", "title", "command", "begun", "machine", "settings", "columns", "rows")
        found = {name: getattr(self, name) for name in names}
        found["ended"], found["load_at_end"] = _date(), list(os.getloadavg())
        (folder / "results.json").write_text(json.dumps(_plain(found), indent=1) + "\n")
        (folder / "table.md").write_text(self.table())

    def _head(self) -> list[str]:
        return [_cells(list(self.columns.values())), "|---" * len(self.columns) + "|"]

    def _line(self, row: dict[str, Any]) -> str:
        return _cells([_text(row.get(key)) for key in self.columns])


def _plain(value: Any) -> Any:
    """``value`` for JSON: named tuples become dicts."""
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _cells(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        small = 0 < abs(value) < 0.001
        return f"{value:.1e}" if small else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    if hasattr(value, "median"):  # a Spread
        return str(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return str(value)


def _command(words: Sequence[str]) -> str:
    """The command line, without the folder that the program is in."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin == words[0]:
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    elif words[0].endswith(".py"):
        program = f"python {words[0]}"
    else:
        program = Path(words[0]).name
    return " ".join([program, *map(shlex.quote, words[1:])])


def _date() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
