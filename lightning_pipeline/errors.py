"""Errors that users see, in three parts: what must hold, where it came from, what to change."""

from __future__ import annotations

import linecache


class PipelineError(RuntimeError):
    """Base class of the errors that a run under the pipeline strategy raises."""


class SplitError(PipelineError):
    """A module cannot be cut into stages.

    Args:
        module: Dotted name of the module at fault; ``""`` is the outermost one.
        reason: What stands in the way.
        cure: What to change, with a value or a line that works.
        location: File and line number of the user's code at fault.

    Attributes:
        depends_on_values: Whether the code at fault reads the values of tensors.
    """

    depends_on_values: bool = False

    def __init__(
        self,
        module: str,
        reason: str,
        cure: str,
        location: tuple[str, int] | None = None,
    ) -> None:
        self.module, self.reason, self.cure, self.location = module, reason, cure, location
        where = ""
        if location is not None:
            line = linecache.getline(*location).strip()
            where = f" ({location[0]}:{location[1]}: `{line}`)"
        name = repr(module) if module else "the pipelined module's own forward"
        super().__init__(f"Cannot cut inside {name}{where}: {reason}. {cure}")


class StepError(PipelineError):
    """The user's step does something that a pipeline cannot follow."""


class ElsewhereError(PipelineError):
    """A parameter or buffer was used on a rank that does not hold it."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, or read back as it was written."""
