"""How a run ends when one of its ranks fails: fault by launcher.

    python -m benchmarks.faults [--faults forward,loss] [--launchers popen,torchrun] [--write]

Each line is a run of `benchmarks/faults/script.py` in which something goes wrong in the third
batch. Seconds go from that moment to the end of the last process that the run has started. What
each run said, and the figures, are kept in the folder `--output`; with `--write` the table of all
that it has goes into `docs/faults.md`, between its markers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("popen", "spawn", "fork", "torchrun")
FAULTS = {
    "error in a layer of rank 1": ("forward", 1),
    "error in the loss (rank 0)": ("loss", 0),
    "error in a hook of rank 1": ("hook", 1),
    "error in a hook of rank 0": ("hook", 0),
    "error in a hook of rank 1, rank 0 is in a sleep": ("alone", 1),
    "error in a hook of rank 0, rank 1 is in a sleep": ("alone", 0),
    "error in a loader's worker of rank 1": ("worker", 1),
    "disk full while rank 0 saves": ("save", 0),
    "OutOfMemoryError on rank 1": ("memory", 1),
    "SIGKILL of rank 1": ("signal:SIGKILL", 1),
    "SIGKILL of rank 0": ("signal:SIGKILL", 0),
    "SIGTERM of rank 1": ("signal:SIGTERM", 1),
    "SIGTERM of rank 0": ("signal:SIGTERM", 0),
    "SIGINT of rank 1": ("signal:SIGINT", 1),
    "SIGINT of rank 0": ("signal:SIGINT", 0),
    "rank 1 sits still, timeout=10 s": ("stall", 1),
    "SIGTERM of rank 0, which waits for one that sits still": ("stuck", 0),
}
"""What happens, as `script.py` names it, and on which rank."""

DEADLINE = 60.0
_CAUSE = re.compile(r"Rank \d+ .*(failed|was sent|is gone|was waiting)")
_ERROR = re.compile(r"\w*(Error|Exception)\b(: |$)|Detected KeyboardInterrupt")


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        seconds: From the fault until the last process was gone; infinite if one had to be killed.
        code: Exit code of the command.
        said: What it said first of the cause.
        output: All that it said.
        left: Files that it left in shared memory.
    """

    seconds: float
    code: int
    said: str
    output: str
    left: tuple[str, ...]


def command(launcher: str, world: int) -> list[str]:
    """What starts the script."""
    script = [str(ROOT / "benchmarks/faults/script.py")]
    if launcher != "torchrun":
        return [sys.executable, *script, "--start", launcher]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [sys.executable, *torchrun, *script]


def run(kind: str, rank: int, launcher: str, ranks: int = 2, replicas: int = 1) -> End:
    """Runs the script with one fault, to the end of all its processes.

    Args:
        kind: What happens, as the script names it.
        rank: Global rank on which it happens.
        launcher: One of `LAUNCHERS`.
        ranks: Ranks in one pipeline.
        replicas: Replicas of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, mark, before = Path(folder, "output"), uuid.uuid4().hex, shared_memory()
        sizes = ["--ranks", str(ranks), "--replicas", str(replicas)]
        options = [kind, "--rank", str(rank), *sizes, "--folder", folder]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command(launcher, ranks * replicas), *options],
                cwd=folder,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    "FAULTS_RUN": mark,
                    "PYTHONWARNINGS": "ignore",
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            gone = wait(process, mark, Path(folder, "moment"))
        finally:
            kill(mark)
        text = output.read_text()
    left = shared_memory() - before
    if left:
        time.sleep(2)  # other programs use it too, for a moment
        left &= shared_memory()
    return End(gone, process.returncode, first_words(text), text, tuple(sorted(left)))


def wait(process: subprocess.Popen[bytes], mark: str, moment: Path) -> float:
    """Seconds from the moment of the fault until no process of the run is left."""
    end = time.time() + 3 * DEADLINE
    while process.poll() is None or processes(mark):
        if moment.exists():
            end = min(end, float(moment.read_text() or time.time()) + DEADLINE)
        if time.time() > end:
            kill(mark)
            process.wait()
            return float("inf")
        time.sleep(0.05)
    return time.time() - float(moment.read_text()) if moment.exists() else float("nan")


def kill(mark: str) -> None:
    """Ends what is left of a run."""
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(mark: str) -> list[int]:
    """The processes of a run, by what they inherited."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"FAULTS_RUN={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def shared_memory() -> set[str]:
    """Names of what there is in shared memory."""
    return set(os.listdir("/dev/shm"))


def first_words(text: str) -> str:
    """What an output says first of the cause: the failure of a rank, behind its error if that is
    in the line above, or else an error."""
    lines = [re.sub(r"^\[rank ?\d+\]:? ?", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    for above, line in itertools.pairwise(["", *lines]):
        if _CAUSE.search(line):
            alone = _ERROR.search(line) or not _ERROR.search(above) or above.endswith(":")
            return line if alone else f"{above} / {line}"
    return next(filter(_ERROR.search, lines), "")


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows in Markdown, in the order of `FAULTS` and `LAUNCHERS`."""
    lines = [
        "| what happens | ranks | launcher | seconds until all are gone | exit code | said first |",
        "|---|---|---|---|---|---|",
    ]
    for name, launcher, layout in itertools.product(FAULTS, LAUNCHERS, ("2x1", "2x2")):
        row = rows.get(f"{layout} {launcher} {name}")
        if row is None:
            continue
        said = row["said"].replace("|", "\\|")
        said = said if len(said) <= 110 else said[:107] + "..."
        figures = f"{row['seconds']:.1f} | {row['code']}"
        lines.append(f"| {name} | {layout} | {launcher} | {figures} | `{said}` |")
    return "\n".join(lines)


def write(path: Path, text: str, name: str = "faults") -> None:
    """Puts a table between the markers of a page."""
    begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
    page = path.read_text()
    head, tail = page[: page.index(begin) + len(begin)], page[page.index(end) :]
    path.write_text(f"{head}{text}\n{tail}")


def main() -> None:
    """Runs what was asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", default="", help="kinds, e.g. forward,signal:SIGKILL")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--layouts", default="2x1,2x2", help="ranks of a pipeline x replicas")
    parser.add_argument("--write", action="store_true", help="into docs/faults.md")
    parser.add_argument("--output", type=Path, default=Path("outputs/faults"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # such that no run is left behind
    figures = args.output / "figures.json"
    rows = json.loads(figures.read_text()) if figures.exists() else {}
    for layout, name in itertools.product(args.layouts.split(","), FAULTS):
        kind, rank = FAULTS[name]
        if args.faults and kind not in args.faults.split(","):
            continue
        for launcher in args.launchers.split(","):
            end = run(kind, rank, launcher, *map(int, layout.split("x")))
            row = {"seconds": end.seconds, "code": end.code, "said": end.said, "left": end.left}
            rows[f"{layout} {launcher} {name}"] = row
            figures.write_text(json.dumps(rows, indent=1))
            (args.output / f"{layout}-{launcher}-{kind}-{rank}.txt").write_text(end.output)
            print(layout, launcher, name, row, flush=True)
    if args.write:
        write(ROOT / "docs/faults.md", table(rows))


if __name__ == "__main__":
    main()
