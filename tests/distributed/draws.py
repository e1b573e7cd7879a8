"""Random configurations, each of them a value that ``repr`` gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import strategies as st

from lightning_pipeline.schedules import SCHEDULES, get_schedule
from tests.models.blocks import (
    BLOCKS,
    EACH_MICROBATCH,
    NEEDS_WIDE_NUMBERS,
    NOT_CALLED,
    OTHER_STRIDES,
    RANDOM,
    SEVERAL_USES,
)
from tests.models.drawn import FORMS, LOGS, OPTIMIZERS, SCHEDULERS, STEPS


@dataclass(frozen=True)
class Draw:
    """A configuration, as far as the drawn numbers go; ``repr`` gives it back.

    Attributes:
        against: ``"batches"`` compares with whole batches on one device (or DDP),
            ``"microbatches"`` with accumulated microbatches, ``"rounding"`` to the last bit, and
            ``"GPipe"`` with that schedule over as many stages, which draws the same random numbers.
        blocks: Of the model, as `tests.models.blocks` names them.
        frozen: Places of frozen blocks.
        step: Of the model.
        rows: Of a batch.
        rest: Rows of the last batch of an epoch; 0 for one as the others.
        length: Of the sequences.
        ranks: In one pipeline.
        replicas: Of the pipeline.
        schedule: A name, or ``"file"``.
        depth: Stages on a rank.
        microbatches: The argument.
        partition: The argument; numbers are places of blocks.
        recompute: The argument ``activation_checkpointing``.
        balance_by: The argument.
        accumulate: Batches.
        precision: Of the Trainer.
        clip: Arguments of the Trainer.
        validate: When.
        then: What follows the training, or what comes in its middle: it goes on from a checkpoint.
        optimizer: Of the model.
        scheduler: Of the model.
        log: Of the model.
        form: Of the batches.
        thaws: Whether frozen blocks are trained from the second epoch on.
        nudged: Whether a hook changes gradients.
        callback: A name in `tests.distributed.trials.CALLBACKS`.
    """

    against: str
    blocks: tuple[str, ...]
    frozen: tuple[int, ...]
    step: str
    rows: int
    rest: int
    length: int
    ranks: int
    replicas: int
    schedule: str
    depth: int
    microbatches: int | str
    partition: str | tuple[int, ...]
    recompute: str
    balance_by: str
    accumulate: int
    precision: str
    clip: tuple[float, str] | None
    validate: str
    then: str
    optimizer: str
    scheduler: str
    log: str
    form: str
    thaws: bool
    nudged: bool
    callback: str


Choice = Callable[..., Any]
"""Picks one of its arguments."""


@st.composite
def draws(draw: Any) -> Draw:
    """Configurations of which most can be run."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    against = one(*["batches"] * 6, "microbatches", "rounding", "GPipe")
    blocks = tuple(draw(st.lists(st.sampled_from(_blocks(against)), min_size=1, max_size=9)))
    places = st.integers(0, len(blocks) - 1)
    layout = _layout(one, against)
    needed = layout["ranks"] * layout["depth"] - 1
    partition = one(*["auto"] * 5, "uniform", "by hand", "by hand")
    if partition == "auto" and against == "GPipe":
        partition = "uniform"  # the other depends on how stages lie on ranks
    if partition == "by hand":
        called = [place for place, name in enumerate(blocks) if name not in NOT_CALLED]
        if len(called) >= needed and one(*[True] * 9, False):
            chosen = st.permutations(called).map(lambda places: places[:needed])
        else:
            chosen = st.lists(places, unique=True, max_size=8)
        partition = tuple(sorted(draw(chosen)))
    frozen = tuple(sorted(draw(st.sets(places, max_size=3)))) if one(False, False, True) else ()
    return Draw(
        against=against,
        blocks=blocks,
        frozen=frozen,
        partition=partition,
        recompute=one("none", "none", "none", "full", "except_last", "layers"),
        balance_by=one("cost", "cost", "cost", "time"),
        **layout,
        **_training(one, against, layout["replicas"]),
    )


def _blocks(against: str) -> list[str]:
    """Those that such a comparison can be made with."""
    left_out = set(EACH_MICROBATCH) if against != "microbatches" else set()
    left_out |= set(RANDOM) if against != "GPipe" else set()
    if against == "rounding":
        left_out |= {*NEEDS_WIDE_NUMBERS, *SEVERAL_USES, *OTHER_STRIDES}
    return [name for name in BLOCKS if name not in left_out]


def _layout(one: Choice, against: str) -> dict[str, Any]:
    """Ranks, schedule and batch; mostly such that the schedule allows them."""
    cuts_evenly = against != "batches"
    ranks, replicas = one(1, 2, 2, 2, 3, 4), 1 if cuts_evenly else one(1, 1, 1, 2)
    if replicas == 2 or against == "GPipe":
        ranks = min(ranks, 2)
    names = [entry.name for entry in SCHEDULES] + ["file"]
    if against == "rounding":  # in the others the last microbatch may come back first
        names = [name for name in names if name not in ("LoopedBFS", "file")]
    schedule = one(*names)
    count: int | str = one(*((1, 2, 4, 8) if against == "rounding" else (1, 2, 3, 4, 5, 8)))
    if schedule == "file":
        depth = one(1, 1, 2)
    else:
        entry = get_schedule(schedule)
        most = min(2 if against == "GPipe" else 3, entry.max_stages_per_rank or 3)
        depth = one(*range(entry.min_stages_per_rank, most + 1))
        if against == "rounding":  # shares of other counts are rounded themselves
            counts = (c for c in (1, 2, 4, 8, 16) if entry.allows_microbatches(c, ranks, depth))
            count = one(*counts)
        elif cuts_evenly or one(*[True] * 9, False):
            count = entry.nearest_microbatches(int(count), ranks, depth)[-1]
    rows = int(count) * one(2, 3) if cuts_evenly else one(1, 2, 3, 4, 5, 7, 8, 11, 12, 16)
    if not cuts_evenly and schedule != "file":
        count = one("auto", count, count)
    return {
        "rows": rows,
        "rest": 0 if cuts_evenly else one(0, 0, 1, 2, rows - 1),
        "length": one(1, 2, 3, 4),
        "ranks": ranks,
        "replicas": replicas,
        "schedule": schedule,
        "depth": depth,
        "microbatches": count,
    }


def _training(one: Choice, against: str, replicas: int) -> dict[str, Any]:
    """The step, the optimizer and the Trainer's flags.

    Accumulated microbatches are batches of their own: to a weight, a hook, a counter of batches,
    and to what is logged of the last one.
    """
    cuts_evenly, rounds = against != "batches", against == "rounding"
    left_out = {"weight", "own code", "collects"} if cuts_evenly or replicas == 2 else set()
    left_out |= {"two views", "two nets", "penalty"} if rounds else set()
    left_out |= {"lengths"} if cuts_evenly else set()
    steps = [name for name in STEPS if name not in left_out]
    step = one(*steps, *(name for name in steps if name != "manual"), "forward")
    accumulate = 1 if step in ("weight", "manual") else one(1, 1, 2, 2 if rounds else 3)
    # Lightning goes on from an epoch's end in the middle of accumulated batches, which are others
    # where microbatches are batches.
    goes_on = ["go on", "go on from a folder"] if accumulate == 1 or not cuts_evenly else []
    callbacks = ["average", "stop", *(["window"] if step != "weight" else [])]
    norms = [(0.05, "norm"), (0.01, "value")]
    drawn = {
        "step": step,
        "accumulate": accumulate,
        "precision": one("32-true", "bf16-true", "bf16-mixed") if rounds else "64-true",
        "clip": None if rounds or step == "manual" else one(None, None, *norms),
        "validate": one("never", "epoch", "sanity", "often"),
        "then": one("nothing", "nothing", "validate", "predict", *goes_on),
        "optimizer": one(*[name for name in OPTIMIZERS if name != "LBFGS"] * 4, "LBFGS"),
        "scheduler": one(*(n for n in SCHEDULERS if n != "plateau" or not cuts_evenly)),
        "log": one(*LOGS),
        "form": one("list", "list", *FORMS),
        "thaws": replicas == 1 and one(False, True),
        "callback": "none" if cuts_evenly else one("none", "none", *callbacks),
        "nudged": not cuts_evenly and one(False, False, False, True),
    }
    if replicas == 2 and (drawn["scheduler"], drawn["callback"]) == ("plateau", "average"):
        # By a metric of each replica's own the rates part, and under DDP the averages with them.
        drawn["log"] = "synced"
    return drawn


def draw_from(seed: int) -> Draw:
    """The draw of a seed; the first that hypothesis makes is always the simplest one."""
    found = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
    @hypothesis.given(draws())
    def note(draw: Draw) -> None:
        found.append(draw)

    note()
    return found[-1]
