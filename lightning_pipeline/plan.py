"""What a run will do, as a plain value: who holds what, what it costs, how long ranks will wait."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_pipeline.actions import action_lists
from lightning_pipeline.mesh import Mesh, MeshSizes
from lightning_pipeline.names import common_prefix, condense_names
from lightning_pipeline.schedules import Auto, Schedule
from lightning_pipeline.simulate import StageTime, Timeline, simulate
from lightning_pipeline.wording import listed, plural

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_COLUMNS = ("stage", "rank", "modules", "parameters", "size", "cost", "in flight")
_LEFT = {"rank", "modules"}
_MODULES = _COLUMNS.index("modules")
_WIDTH = 60  # of the column of modules in plain text


@dataclass(frozen=True)
class StagePlan:
    """One piece of the model.

    Attributes:
        index: Index of the stage.
        rank: Global ranks that hold it, one for each replica of the pipeline.
        modules: Dotted names of the modules that run in it; marked if it is their own code alone.
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
        partition: Names by which ``PipelineStrategy(partition=[...])`` makes the same stages;
            ``None`` if there are none.
        cuts: What runs just before and behind each cut.
    """

    schedule: str
    num_stages: int
    ranks: int
    replicas: int
    microbatches: int
    stages: tuple[StagePlan, ...]
    bubble: float
    notes: tuple[str, ...] = ()
    partition: tuple[str, ...] | None = None
    cuts: tuple[str, ...] = ()

    def adds_to(self, known: Plan | None) -> bool:
        """Whether it says what ``known`` did not: other stages, or a further note."""
        if known is None or set(self.notes) - set(known.notes):
            return True
        placed = [(stage.rank, stage.modules) for stage in self.stages]
        return placed != [(stage.rank, stage.modules) for stage in known.stages]

    def print(self) -> None:
        """Prints it as a table, or as text that no width cuts off where there is no terminal."""
        import rich

        console = rich.get_console()
        if console.is_terminal or console.is_jupyter:
            console.print(self)
        else:
            print(self, flush=True)

    @property
    def summary(self) -> str:
        """The run in one line."""
        return (
            f"{self.schedule}: {plural(self.num_stages, 'stage')} on "
            f"{plural(self.ranks, 'rank')}, {plural(self.replicas, 'replica')}, "
            f"{plural(self.microbatches, 'microbatch', 'es')} a step, "
            f"predicted bubble {100 * self.bubble:.1f} %"
        )

    @property
    def _prefix(self) -> str:
        return common_prefix([name for stage in self.stages for name in stage.modules])

    def _title(self) -> list[str]:
        return [self.summary, *([f"modules below {self._prefix}"] if self._prefix else [])]

    def _footer(self) -> list[str]:
        """What stands below the table, a line each."""
        lines = []
        if self.partition:
            names = ", ".join(f'"{name}"' for name in self.partition)
            lines.append(f"partition=[{names}]")
        elif self.cuts:
            lines.append(f"cut at {', '.join(self.cuts)}")
        return [*lines, *(f"- {note}" for note in self.notes)]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        begin = len(self._prefix) + 1 if self._prefix else 0
        for stage in self.stages:
            yield (
                str(stage.index),
                listed(stage.rank),
                condense_names([name[begin:] for name in stage.modules]),
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
            title="\n".join(self._title()),
            title_justify="left",
            title_style="bold",
            caption="cost: share of the computation; in flight: microbatches that a stage keeps "
            "activations of; the last stage is on rank 0",
            caption_justify="left",
        )
        for name in _COLUMNS:
            justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
            table.add_column(name, justify=justify, overflow="fold")
        for row in self._rows():
            # As plain text, or rich would take brackets in a name for markup.
            table.add_row(*map(Text, row))
        return table

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        return Group(self.table(), *(Text(line, overflow="fold") for line in self._footer()))

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [_COLUMNS]
        for row in self._rows():
            first, *more = _wrapped(row[_MODULES])
            lines.append((*row[:_MODULES], first, *row[_MODULES + 1 :]))
            lines += [
                tuple(part if i == _MODULES else "" for i in range(len(row))) for part in more
            ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = self._title()
        for cells in lines:
            padded = (
                cell.ljust(width) if name in _LEFT else cell.rjust(width)
                for name, cell, width in zip(_COLUMNS, cells, widths, strict=True)
            )
            text.append("  ".join(padded).rstrip())
        return "\n".join([*text, *self._footer()])


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
    partition: Sequence[str] | None = None,
    cuts: Sequence[str] = (),
    timeline: Timeline | None = None,
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
        partition: Names for ``PipelineStrategy(partition=[...])`` that make these stages.
        cuts: What runs just before and behind each cut.
        timeline: The timeline of a step; ``None``: it is simulated from the costs.

    Raises:
        ValueError: If the schedule can't run with these sizes.
    """
    meshes = [
        Mesh(sizes, schedule, rank, stages_per_rank) for rank in range(sizes.pipeline * sizes.data)
    ]
    num_stages, v = meshes[0].num_stages, meshes[0].stages_per_rank
    assert len(costs) == len(modules) == len(parameters) == len(bytes) == num_stages
    if timeline is None:
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
        None if partition is None else tuple(partition),
        tuple(cuts),
    )


def _wrapped(names: str) -> list[str]:
    """Lines of names, broken behind commas."""
    return textwrap.wrap(names, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _metric(number: int, unit: str = "") -> str:
    """A count or a size with three digits and a metric prefix, such as ``1.28 M``."""
    value, prefixes = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}{unit}".strip()
