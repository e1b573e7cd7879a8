"""The best way to run a training on some devices, of all that are legal and fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.planning.candidates import (
    RECOMPUTE,
    Bounds,
    Candidate,
    Dropped,
    candidates,
)
from lightning_pipeline.planning.devices import Device
from lightning_pipeline.planning.prediction import Prediction
from lightning_pipeline.splitting import Rates
from lightning_pipeline.wording import plain, plural

_ALIKE = 1e-6
"""Relative difference of the samples per second of two plans that count as equally fast."""

_MORE_DEVICES = 8
"""Numbers of devices that are tried for a model that does not fit."""


@dataclass(frozen=True)
class Outlook:
    """What the planner has found.

    Attributes:
        fitting: Predictions of what fits, the fastest first, without what is much slower.
        num_fitting: Number of all that fit.
        too_large: Predictions of what does not fit, the smallest first.
        dropped: What is not legal.
        limit: Bytes of a device.
    """

    fitting: tuple[Prediction, ...]
    num_fitting: int
    too_large: tuple[Prediction, ...]
    dropped: tuple[Dropped, ...]
    limit: float


class Planner:
    """Predicts ways to run one training.

    The results follow from the arguments alone; no clock is read.

    Args:
        blueprint: The recordings of the module.
        device: The device.
        rates: Its speed in the dtype of the training.
        limit: Bytes of a device.
    """

    def __init__(self, blueprint: Blueprint, device: Device, rates: Rates, limit: float) -> None:
        self._blueprint, self._device = blueprint, device
        self._rates, self._limit = rates, limit

    def search(self, bounds: Bounds) -> Outlook:
        """Predicts the candidates within bounds.

        Of what fits, that is simulated which may be the best of its kind, or as fast as half of
        the best of all.
        """
        fitting: list[Prediction] = []
        large: list[Prediction] = []
        dropped: list[Dropped] = []
        for found in candidates(bounds, self._blueprint.num_pieces):
            prediction = found if isinstance(found, Dropped) else self._predict(found, bounds)
            if isinstance(prediction, Dropped):
                dropped.append(prediction)
            else:
                (fitting if prediction.peak <= self._limit else large).append(prediction)
        ranked = sorted(_worth_simulating(fitting), key=_rank)
        large.sort(key=lambda p: (p.peak, p.candidate.num_stages, p.candidate.microbatches))
        once = tuple(dict.fromkeys(dropped))
        return Outlook(tuple(ranked), len(fitting), tuple(large), once, self._limit)

    def _predict(self, candidate: Candidate, bounds: Bounds) -> Prediction | Dropped:
        try:
            drawing = self._blueprint.cut(candidate.num_stages)
        except PipelineError as error:
            return Dropped(plural(candidate.num_stages, "stage"), str(error), "pieces")
        return Prediction(candidate, drawing, bounds.rows, self._device, self._rates)

    def refusal(self, bounds: Bounds, outlook: Outlook) -> str:
        """What to say where nothing fits, with the nearest that would.

        Args:
            bounds: What was tried.
            outlook: What was found.
        """
        if not outlook.too_large:
            by_reason = {d.why: f"{d.what}: {d.why}" for d in reversed(outlook.dropped)}
            reasons = "; ".join(reversed(by_reason.values()))
            text = f"A layout must be legal for the model and the batch, but none is. {reasons}."
            return text + self._legal_counts(bounds)
        smallest = outlook.too_large[0]
        ways = list(self._ways(bounds, smallest))
        return (
            f"A training must fit the memory of each device, {gigabytes(self._limit)}, but the "
            f"smallest way, {describe(smallest.candidate)}, needs {gigabytes(smallest.peak)}. "
            f"It needs {', or '.join(ways)}."
        )

    def _legal_counts(self, bounds: Bounds) -> str:
        """The nearest legal number of microbatches as a cure, where it is that which fails."""
        asked = bounds.microbatches
        if asked == "auto":
            return ""
        open_to_all = candidates(replace(bounds, microbatches="auto"), self._blueprint.num_pieces)
        legal = {c.microbatches for c in open_to_all if isinstance(c, Candidate)}
        near = sorted(legal, key=lambda count: abs(count - asked))[:2]
        return f" Set {' or '.join(f'microbatches={n}' for n in sorted(near))}." if near else ""

    def _ways(self, bounds: Bounds, smallest: Prediction) -> Iterator[str]:
        """Changes after which something fits, one of each kind."""

        def fits(changed: Bounds) -> Prediction | None:
            return next(iter(self.search(changed).fitting), None)

        if tuple(bounds.recompute) != RECOMPUTE and (
            found := fits(replace(bounds, recompute=RECOMPUTE))
        ):
            yield f"recomputation (activation_checkpointing={found.candidate.recompute})"
        if bounds.microbatches != "auto":
            there = self.search(replace(bounds, microbatches="auto")).fitting
            counts = sorted({p.candidate.microbatches for p in there})
            if counts:
                near = min(counts, key=lambda m: abs(m - smallest.candidate.microbatches))
                yield f"microbatches={near}"
        yield from self._more_devices(bounds, smallest, fits)
        yield f"devices of {gigabytes(smallest.peak, up=True)}"

    def _more_devices(
        self,
        bounds: Bounds,
        smallest: Prediction,
        fits: Callable[[Bounds], Prediction | None],
    ) -> Iterator[str]:
        room = self._limit - smallest.reserved
        if room <= 0:
            return
        depth = smallest.candidate.stages_per_rank
        held = sum(m.weights + m.gradients + m.optimizer for m in smallest.memory)
        least = max(bounds.devices + 1, math.ceil(held / room))
        for count in range(least, least + _MORE_DEVICES):
            if count * depth > self._blueprint.num_pieces:
                return
            wider = replace(bounds, devices=count, ranks=count)
            wider = replace(wider, schedules=[smallest.candidate.schedule])
            if fits(replace(wider, stages_per_rank=depth)) is not None:
                yield f"{plural(count, 'rank')} of {gigabytes(self._limit)} (devices={count})"
                return


def _rank(found: Prediction) -> tuple[float, ...]:
    """The fastest first; of equally fast ones what needs least memory, then the simplest."""
    candidate = found.candidate
    speed = round(math.log(found.samples_per_second) / _ALIKE)
    return (-speed, found.peak, candidate.stages_per_rank, candidate.microbatches)


def _worth_simulating(fitting: Sequence[Prediction]) -> Iterator[Prediction]:
    """The best of each kind, and all that was simulated to find it; not what is far slower."""
    best: dict[tuple[str, int, int, str], float] = defaultdict(float)
    fastest = 0.0
    for found in sorted(fitting, key=lambda found: -found.most_samples_per_second):
        bound, kind = found.most_samples_per_second, _kind(found)
        if bound <= max(best[kind], fastest / 2):
            continue
        best[kind] = max(best[kind], found.samples_per_second)
        fastest = max(fastest, best[kind])
        yield found


def _kind(found: Prediction) -> tuple[str, int, int, str]:
    schedule, ranks, _, depth, _, recompute = found.candidate
    return schedule.name, ranks, depth, recompute


def best_of_each(found: Sequence[Prediction]) -> list[Prediction]:
    """The first prediction of each schedule, number of ranks and stages, and recomputation."""
    best: dict[tuple[str, int, int, str], Prediction] = {}
    for prediction in found:
        best.setdefault(_kind(prediction), prediction)
    return list(best.values())


def twins(found: Sequence[Prediction]) -> list[list[Prediction]]:
    """Puts predictions together that differ in nothing but the name of the schedule.

    With few microbatches several schedules have one order of work: VHalf and VMin repeat a block
    that is there once, and ZBH2 has no further forward to do ahead of ZBH1's. Where all is
    recomputed no weight gradient is left to be put off.

    Args:
        found: Predictions, the fastest first.

    Returns:
        Groups in the order of their first member.
    """
    groups: list[list[Prediction]] = []
    for prediction in found:
        group = next((each for each in groups if _are_alike(each[0], prediction)), None)
        if group is None:
            groups.append([prediction])
        else:
            group.append(prediction)
    return groups


def _are_alike(one: Prediction, other: Prediction) -> bool:
    return (
        one.candidate[1:] == other.candidate[1:]
        and math.isclose(one.seconds, other.seconds)
        and math.isclose(one.peak, other.peak)
    )


def describe(candidate: Candidate) -> str:
    """A candidate in a few words."""
    schedule, ranks, replicas, depth, microbatches, recompute = candidate
    again = "" if recompute == "none" else f", recomputing {recompute.replace('_', ' ')}"
    return (
        f"{schedule.name} on {plural(ranks, 'rank')} x {plural(replicas, 'replica')}, "
        f"{plural(depth, 'stage')} a rank, {plural(microbatches, 'microbatch', 'es')}{again}"
    )


def gigabytes(size: float, up: bool = False) -> str:
    """Bytes in gigabytes with three digits or so.

    Args:
        size: Bytes.
        up: Whether to round up.
    """
    value = size / 1e9
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    if up:
        value = math.ceil(value * 10**digits) / 10**digits
    return f"{value:.{digits}f} GB"


def seconds_or_ms(value: float) -> str:
    """A duration in three digits.

    Args:
        value: Seconds.
    """
    return f"{plain(value, 3)} s" if value >= 1 else f"{plain(1e3 * value, 3)} ms"
