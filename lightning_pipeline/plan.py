"""What a run will do, as a plain value: who holds what, what it costs, how long ranks will wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from lightning_pipeline.actions import action_lists
from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.schedules import Auto, Schedule
from lightning_pipeline.simulate import StageTime, simulate

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_COLUMNS = ("stage", "rank", "modules", "parameters", "size", "cost", "in flight")
_LEFT = {"rank", "modules"}


@dataclass(frozen=True)
class StagePlan:
    """One piece of the model.

    Attributes:
        index: Index of the stage.
        rank: Global ranks that hold it, one for each replica of the pipeline.
        modules: Dotted names of the modules that run in it.
        parameters: Number of parameters.
        bytes: Memory of the parameters and buffers in bytes.
        share: Its part of the cost of the whole model, 0 to 1.
        in_flight: Most microbatches whose activations it keeps at once.
    """

    index: int
    rank: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: int
    bytes: int
    share: float
    in_flight: int


@dataclass(frozen=True)
class Plan:
    """What a run will do; printing it shows a table.

    Attributes:
        schedule: Name of the schedule.
        num_stages: Number of pieces of the model.
        ranks: Number of ranks in one pipeline.
        replicas: Number of pipelines that run side by side on different data.
        microbatches: Number of microbatches in a step.
        stages: The pieces, in the order in which data passes them.
        bubble: Share of the ranks' time spent waiting, 0 to 1, predicted from the stages' costs.
        notes: Things worth knowing before the run, one sentence each.
    """

    schedule: str
    num_stages: int
    ranks: int
    replicas: int
    microbatches: int
    stages: tuple[StagePlan, ...]
    bubble: float
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The run in one line."""
        return (
            f"{self.schedule}: {_plural(self.num_stages, 'stage')} on "
            f"{_plural(self.ranks, 'rank')}, {_plural(self.replicas, 'replica')}, "
            f"{_plural(self.microbatches, 'microbatch', 'es')} a step, "
            f"predicted bubble {100 * self.bubble:.1f} %"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for stage in self.stages:
            yield (
                str(stage.index),
                ", ".join(map(str, stage.rank)),
                condense_names(stage.modules),
                _metric(stage.parameters),
                _metric(stage.bytes, "B"),
                f"{100 * stage.share:.1f} %",
                str(stage.in_flight),
            )

    def table(self) -> Table:
        """Returns the stages as a table of rich, one row each."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=self.summary,
            title_justify="left",
            title_style="bold",
            caption="cost: share of the computation; in flight: microbatches that a stage keeps "
            "activations of; the last stage is on rank 0",
            caption_justify="left",
        )
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in _LEFT else "right")
        for row in self._rows():
            # As plain text, or rich would take brackets in a name for markup.
            table.add_row(*map(Text, row))
        return table

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        return Group(self.table(), *(Text(f"- {note}") for note in self.notes))

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.summary]
        for row in rows:
            cells = (
                cell.ljust(width) if name in _LEFT else cell.rjust(width)
                for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
            )
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])


def make_plan(
    schedule: Schedule,
    sizes: MeshSizes,
    microbatches: int,
    costs: Sequence[float],
    modules: Sequence[Sequence[str]],
    parameters: Sequence[int],
    bytes: Sequence[int],
    stages_per_rank: int | Auto = "auto",
    notes: Sequence[str] = (),
) -> Plan:
    """Predicts a run from the costs of its stages.

    Example:
        >>> plan = make_plan(
        ...     get_schedule("1F1B"), MeshSizes(2, 1), 4, costs=[1.0, 1.0],
        ...     modules=[["stem"], ["head"]], parameters=[8, 8], bytes=[32, 32],
        ... )
        >>> round(plan.bubble, 3), plan.stages[0].in_flight
        (0.2, 2)

    Args:
        schedule: The schedule.
        sizes: Ranks in one pipeline and number of replicas.
        microbatches: Number of microbatches in a step.
        costs: For each stage, seconds of one microbatch, forward and backward together.
        modules: For each stage, dotted names of its modules.
        parameters: For each stage, the number of parameters.
        bytes: For each stage, the memory of its parameters and buffers.
        stages_per_rank: Stages that each rank holds; ``"auto"`` as in ``PipelineStrategy``.
        notes: Sentences to show below the table.

    Raises:
        ValueError: If the schedule can't run with these sizes.
    """
    meshes = [
        Mesh(sizes, schedule, rank, stages_per_rank) for rank in range(sizes.pipeline * sizes.data)
    ]
    num_stages, v = meshes[0].num_stages, meshes[0].stages_per_rank
    assert len(costs) == len(modules) == len(parameters) == len(bytes) == num_stages
    # A backward costs two forwards: one product for the inputs and one for the weights.
    times = [StageTime(cost / 3, cost / 3, cost / 3) for cost in costs]
    timeline = simulate(action_lists(schedule, sizes.pipeline, v, microbatches), times)
    peaks, total = timeline.peak_activations_of_stage, sum(costs)
    stages = tuple(
        StagePlan(
            index=i,
            rank=tuple(mesh.global_rank for mesh in meshes if i in mesh.stages),
            modules=tuple(modules[i]),
            parameters=parameters[i],
            bytes=bytes[i],
            share=costs[i] / total if total else 0.0,
            in_flight=peaks[i],
        )
        for i in range(num_stages)
    )
    return Plan(
        schedule.name,
        num_stages,
        sizes.pipeline,
        sizes.data,
        microbatches,
        stages,
        timeline.bubble,
        tuple(notes),
    )


def stage_modules(pieces: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names the modules of each stage, a module whose pieces are all there by its own name.

    Example:
        >>> stage_modules([["net.0.conv", "net.0.norm", "net.1.conv"], ["net.1.norm", "head"]])
        [['net.0', 'net.1.conv'], ['net.1.norm', 'head']]

    Args:
        pieces: For each stage, the dotted module name of every piece, in order. A piece that is a
            container's own code has the container's name.
    """
    stages_of: dict[str, set[int]] = {}
    for stage, names in enumerate(pieces):
        for name in names:
            for prefix in accumulate(name.split("."), "{}.{}".format):
                stages_of.setdefault(prefix, set()).add(stage)
    named = []
    for names in pieces:
        shown: dict[str, None] = {}
        for name in names:
            prefixes = accumulate(name.split("."), "{}.{}".format)
            whole = (prefix for prefix in prefixes if len(stages_of[prefix]) == 1)
            shown[next(whole, name)] = None
        inner = {name for name in shown if any(other.startswith(name + ".") for other in shown)}
        outer = [name for name in shown if name and name not in inner]
        named.append(outer or list(shown))
    return named


# Parts of dotted names; the part "" says that a name ends there.
_Tree: TypeAlias = "dict[str, _Tree]"


def condense_names(names: Sequence[str]) -> str:
    """Writes dotted names readably: numbered neighbours become ranges.

    Example:
        >>> condense_names(["net.stem", "net.blocks.0", "net.blocks.1", "net.norm"])
        'net.stem, net.blocks.0-1, net.norm'
        >>> condense_names(["net.0.conv", "net.0.norm", "net.1.conv", "net.1.norm"])
        'net.0-1.{conv, norm}'

    Args:
        names: Dotted names; ``""`` is the outermost module itself.
    """
    tree: _Tree = {}
    for name in names:
        node = tree
        for part in (name or "(whole module)").split("."):
            node = node.setdefault(part, {})
        node[""] = {}
    return ", ".join(_paths(tree)) if names else "-"


def _paths(tree: _Tree) -> list[str]:
    """The condensed names below one node."""
    paths: list[str] = []
    for first, last, below in _runs(tree):
        label = first if first == last else f"{first}-{last}"
        tails = [tail for tail in _paths(below) if tail]
        if "" in below or not below:
            paths.append(label)
        if len(tails) > 1 and first.isdigit():
            paths.append(f"{label}.{{{', '.join(tails)}}}")
        else:
            paths += [f"{label}.{tail}" for tail in tails]
    return paths


def _runs(tree: _Tree) -> Iterator[tuple[str, str, _Tree]]:
    """First and last part of each run of consecutive numbers that have the same names below."""
    run: tuple[str, str, _Tree] | None = None
    for part, below in tree.items():
        if run is not None:
            first, last, same = run
            if last.isdigit() and part == str(int(last) + 1) and below == same:
                run = (first, part, same)
                continue
            yield run
        run = (part, part, below)
    if run is not None:
        yield run


def _metric(number: int, unit: str = "") -> str:
    """A count or a size with three digits and a metric prefix, such as ``1.28 M``."""
    value, prefixes = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}{unit}".strip()


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}" + ("" if count == 1 else ending)
