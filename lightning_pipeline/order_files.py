"""Schedules in files: one row a rank, one action a cell, as torch writes them.

    0F0,0F1,,,0B0,0F2,0B1,,0B2
    ,1F0,1B0,1F1,1B1,1F2,1B2,,

Empty cells are time in which the rank waits; they say nothing, for an action begins when all that
it needs is there.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from lightning_pipeline.actions import Action
from lightning_pipeline.orders import Lists
from lightning_pipeline.schedules import Placement, Schedule, Sizes
from lightning_pipeline.simulate import Deadlock, StageTime, simulate
from lightning_pipeline.wording import plural

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


class _Cell(NamedTuple):
    """Where an action stands, counted from 1."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}"


def read_schedule(path: str | Path) -> Schedule:
    """Reads a schedule from a file and checks that it can be run.

    Example:
        >>> schedule = read_schedule("orders.csv")
        >>> schedule.sizes
        Sizes(ranks=2, microbatches=3)

    Args:
        path: A CSV file with a row for each rank of one pipeline. Cells are actions such as
            ``0F3``, pairs such as ``(0F3;3B1)OVERLAP_F_B``, which run one after the other, or
            empty. Stages are dealt out in rounds or along a V.

    Returns:
        A schedule for exactly these ranks, stages and microbatches.

    Raises:
        ValueError: If an action is unknown, missing, there twice, on the wrong rank or before one
            that it needs; names it with its row and column.
    """
    return _File(Path(path)).schedule()


def write_order(lists: Sequence[Sequence[Action]], path: str | Path) -> None:
    """Writes action lists into a file that `read_schedule` reads.

    Args:
        lists: For each rank of one pipeline, what it computes, in order.
        path: The file; folders that it is in are made.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([str(action) for action in row] for row in lists)


def schedule_of(lists: Lists, name: str, placement: Placement, stages_per_rank: int) -> Schedule:
    """The schedule that action lists make, for exactly their sizes.

    Args:
        lists: For each rank of one pipeline, what it computes, in an order that can be run.
        name: Its name.
        placement: How the stages lie on the ranks.
        stages_per_rank: Stages on each rank.
    """
    return Schedule(
        name,
        name,
        min_stages_per_rank=stages_per_rank,
        max_stages_per_rank=stages_per_rank,
        placement=placement,
        splits_backward=any(action.op == "I" for row in lists for action in row),
        order=partial(_as_written, lists),
        in_torch=False,
        sizes=Sizes(len(lists), _microbatches(lists)),
    )


def _microbatches(lists: Lists) -> int:
    return 1 + max(action.microbatch for row in lists for action in row)


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._cells: dict[Action, _Cell] = {}
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"A schedule's file must be readable, got {error}. The name comes from "
                f"schedule={str(path)!r}. Set it to a file with a row of actions for each rank."
            ) from None
        rows = list(csv.reader(text.splitlines()))
        while rows and not any(cell.strip() for cell in rows[-1]):
            rows.pop()
        self._lists = [list(self._actions(row, cells)) for row, cells in enumerate(rows, 1)]

    def schedule(self) -> Schedule:
        lists = self._lists
        if not any(lists):
            self._refuse("at least one action", "none", "write a row of actions for each rank")
        microbatches = _microbatches(lists)
        num_stages = 1 + max(action.stage for action in self._cells)
        if num_stages > len(self._cells):
            last = max(self._cells, key=lambda action: action.stage)
            self._refuse(
                f"actions of each of its {num_stages} stages",
                f"{last} in {self._cells[last]} and {len(self._cells)} actions in all",
                "correct the number of the stage",
            )
        placement, depth = self._placement(num_stages)
        for stage in range(num_stages):
            for microbatch in range(microbatches):
                self._check_complete(stage, microbatch)
        self._check_forwards()
        self._check_order(num_stages)
        return schedule_of(lists, str(self._path), placement, depth)

    def _refuse(self, rule: str, got: str, cure: str) -> NoReturn:
        raise ValueError(
            f"A schedule needs {rule}, got {got}. The lists come from {self._path}. "
            f"{cure[0].upper()}{cure[1:]}."
        )

    def _actions(self, row: int, cells: Sequence[str]) -> Iterable[Action]:
        for column, text in enumerate(cells, 1):
            pair = _PAIR.fullmatch(text.strip())
            for word in pair.groups() if pair else (text.strip(),):
                if not word:
                    continue
                cell, match = _Cell(row, column), _ACTION.fullmatch(word)
                if match is None:
                    self._refuse(
                        "actions of a stage, an operation (F, B, I or W) and a microbatch",
                        f"{word!r} in {cell}",
                        "write it as 0F3, or leave the cell empty",
                    )
                action = Action(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]
                if action in self._cells:
                    self._refuse(
                        "every action once",
                        f"{action} in {self._cells[action]} and in {cell}",
                        "remove one of them",
                    )
                self._cells[action] = cell
                yield action

    def _placement(self, num_stages: int) -> tuple[Placement, int]:
        """How the stages lie on the ranks, and how many on each."""
        ranks, rank_of = len(self._lists), dict[int, int]()
        for action, cell in self._cells.items():
            rank = rank_of.setdefault(action.stage, cell.row - 1)
            if rank != cell.row - 1:
                self._refuse(
                    "each stage on one rank",
                    f"{action} in {cell}, and stage {action.stage} in row {rank + 1}",
                    f"move it to row {rank + 1}",
                )
        depth = -(-num_stages // ranks)
        shapes: tuple[Placement, ...] = ("loop", "v") if depth == 2 else ("loop",)
        wrong = dict[int, int]()  # where each shape puts the first stage that is not there
        for shape in shapes:
            place = partial(Schedule("", "", placement=shape).rank_of_stage, ranks=ranks)
            stages = range(ranks * depth)
            elsewhere = [s for s in stages if rank_of.get(s) != place(s, stages_per_rank=depth)]
            if not elsewhere:
                return shape, depth
            wrong[elsewhere[0]] = place(elsewhere[0], stages_per_rank=depth)
        stage = max(wrong)
        first = next((f"{a} in {cell}" for a, cell in self._cells.items() if a.stage == stage), "")
        self._refuse(
            f"{plural(depth, 'stage')} on each of its {plural(ranks, 'rank')}, dealt out in rounds "
            "or along a V",
            first or f"no action of stage {stage}",
            f"write stage {stage} into row {wrong[stage] + 1}",
        )

    def _check_complete(self, stage: int, microbatch: int) -> None:
        ops = [op for op in "FBIW" if Action(stage, op, microbatch) in self._cells]  # type: ignore[arg-type]
        if ops in (["F", "B"], ["F", "I", "W"]):
            return
        row = next(cell.row for action, cell in self._cells.items() if action.stage == stage)
        got = ", ".join(
            f"{stage}{op}{microbatch} in {self._cells[stage, op, microbatch]}"  # type: ignore[index]
            for op in ops
        )
        split = "I" in ops or "W" in ops
        missing = [op for op in ("FIW" if split else "FB") if op not in ops]
        names = " and ".join(f"{stage}{op}{microbatch}" for op in missing)
        surplus = f"remove {stage}B{microbatch}, or the parts of it"
        self._refuse(
            "a forward and a whole backward B, or its parts I and W, for each stage and microbatch",
            f"{got or 'nothing'} for microbatch {microbatch} of stage {stage}",
            f"add {names} to row {row}" if missing else surplus,
        )

    def _check_forwards(self) -> None:
        """Statistics, counters and logs are those of microbatches one after the other."""
        last: dict[int, Action] = {}
        for row in self._lists:
            for action in row:
                if action.op != "F":
                    continue
                before = last.get(action.stage, action)
                if before.microbatch > action.microbatch:
                    self._refuse(
                        "the forwards of each stage in the order of the microbatches",
                        f"{before} in {self._cells[before]} before {action} in "
                        f"{self._cells[action]}",
                        "swap them",
                    )
                last[action.stage] = action

    def _check_order(self, num_stages: int) -> None:
        try:
            simulate(self._lists, [StageTime(1, 1, 1)] * num_stages)
        except Deadlock as error:
            stuck = "; ".join(
                f"{action} in {self._cells[action]} needs {needed}, which is in {cell}"
                for action, options in error.stuck
                for needed, cell in ((a, self._cells[a]) for a in options if a in self._cells)
            )
            self._refuse("every action behind those that it needs", stuck, "move one of them")


def _as_written(lists: Lists, ranks: int, stages_per_rank: int, microbatches: int) -> Lists:
    return lists
