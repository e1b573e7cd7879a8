"""How many ranks and replicas follow from devices, stages and schedule: plain arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipeline.schedules import AUTO, Auto, Schedule, get_schedule, require_count
from lightning_pipeline.wording import one_of, plural


class Layout(NamedTuple):
    """How a model lies on the devices.

    Attributes:
        ranks: Number of ranks in one pipeline.
        replicas: Number of pipelines side by side.
        stages_per_rank: Number of stages that each rank holds; ``"auto"`` as long as the schedule
            is open.
    """

    ranks: int
    replicas: int
    stages_per_rank: int | Auto


def resolve_layout(
    devices: int,
    stages: int | Auto = "auto",
    schedule: str = "1F1B",
    microbatches: int | Auto = "auto",
    stages_per_rank: int | Auto = "auto",
) -> Layout:
    """Works out a layout and checks it, before anything starts.

    Example:
        >>> resolve_layout(devices=8, stages=4, schedule="interleaved_zero_bubble")
        Layout(ranks=2, replicas=4, stages_per_rank=2)

    Args:
        devices: Number of devices on all nodes together.
        stages: Number of pieces of the model; ``"auto"`` is one pipeline over all devices.
        schedule: Name of the schedule, as torch spells it or in snake case; ``"auto"`` is chosen
            with the first batch, for one pipeline over all devices.
        microbatches: Number of microbatches in a step; ``"auto"`` always fits.
        stages_per_rank: Stages that each rank holds; ``"auto"`` is 1 for single-stage schedules,
            2 otherwise.

    Raises:
        ValueError: If they do not fit together; names the nearest values that do.
    """
    require_count("devices", devices)
    if schedule.lower() == AUTO:
        if stages != "auto":
            deeper = stages > devices and stages % devices == 0
            name = "interleaved_1f1b" if deeper else "1f1b"
            fits = deeper or (stages > 1 and devices % stages == 0)
            raise ValueError(
                f"schedule=auto chooses the stages with the first batch, got stages={stages}. Set "
                "stages=auto for one pipeline over all devices, "
                "strategy.pipeline_parallel_size=RANKS strategy.data_parallel_size=auto for "
                "shorter ones, or name the schedule"
                + (f", e.g. schedule={name} stages={stages}." if fits else ".")
            )
        return Layout(devices, 1, stages_per_rank)
    entry = get_schedule(schedule)
    depth = entry.resolve_stages_per_rank(stages_per_rank)
    if devices < 2:
        raise ValueError(
            f"A pipeline needs at least 2 devices, got {devices}. The number comes from "
            f"devices={devices}. Set devices=2, or strategy=single to train on one device."
        )
    own = devices if entry.sizes is None else entry.sizes.ranks
    total = own * depth if stages == "auto" else stages
    require_count("stages", total)
    if total % depth or total == depth or devices % (total // depth):
        raise ValueError(_refusal(entry, devices, total, depth))
    ranks = total // depth
    entry.check_ranks(ranks)
    check_microbatches(entry, ranks, depth, microbatches)
    return Layout(ranks, devices // ranks, depth)


def _refusal(schedule: Schedule, devices: int, stages: int, depth: int) -> str:
    """What to say when the stages can't be dealt out evenly, with the nearest numbers that can."""
    ranks, rest = divmod(stages, depth)
    if rest:
        are = "is" if stages == 1 else "are"
        rule = f"{plural(stages, 'stage')} {are} not a multiple of {depth}"
    elif ranks == 1:
        fill = "fills" if stages == 1 else "fill"
        rule = f"{plural(stages, 'stage')} {fill} one rank, and a pipeline needs at least 2"
    else:
        rule = f"{stages} stages fill {ranks} ranks, which do not divide {devices} devices"
    legal = [] if schedule.sizes is not None else _legal_stages(devices, depth)
    cures = [f"stages={count}" for count in _nearest(legal, stages)]
    if not rest and ranks > 1:
        fitting = [k * ranks for k in range(1, devices // ranks + 2)]
        cures += [f"devices={count}" for count in _nearest(fitting, devices)]
    deeper, uneven = divmod(stages, devices)
    if not uneven and deeper != depth and _allows(schedule, deeper):
        cures.append(f"schedule.stages_per_rank={deeper}")
    return (
        f"The stages must fill equal pipelines on all devices, but {rule}. They come from "
        f"stages={stages}, devices={devices} and schedule={schedule.snake}, which puts {depth} "
        f"on a rank. Set {' or '.join(cures)}."
    )


def _legal_stages(devices: int, depth: int) -> list[int]:
    return [ranks * depth for ranks in range(2, devices + 1) if devices % ranks == 0]


def _nearest(legal: list[int], value: int) -> list[int]:
    """The largest legal number below a value and the smallest above it, where there are such."""
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def _allows(schedule: Schedule, depth: int) -> bool:
    high = schedule.max_stages_per_rank
    return depth >= schedule.min_stages_per_rank and (high is None or depth <= high)


def check_microbatches(
    schedule: Schedule, ranks: int, depth: int, microbatches: int | Auto
) -> None:
    """Checks the microbatches in the words of the command line, not of the strategy.

    Args:
        schedule: The schedule.
        ranks: Number of ranks in one pipeline.
        depth: Number of stages that each rank holds.
        microbatches: Number of microbatches in a step; ``"auto"`` always fits.

    Raises:
        ValueError: If the schedule can't run that many; names the nearest that it can.
    """
    if microbatches == "auto":
        return
    require_count("microbatches", microbatches)
    if schedule.allows_microbatches(microbatches, ranks, depth):
        return
    counts = schedule.nearest_microbatches(microbatches, ranks, depth)
    cures = " or ".join(f"microbatches={count}" for count in counts)
    needed = one_of(counts, "microbatch", "es")
    raise ValueError(
        f"{schedule.name} needs {needed}, the nearest to the {microbatches} it got, for "
        f"{plural(ranks * depth, 'stage')} on {plural(ranks, 'rank')}. The number comes from "
        f"microbatches={microbatches}. Set {cures} or microbatches=auto."
    )
