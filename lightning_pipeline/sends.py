"""Messages of a rank that are under way, and when they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_pipeline.actions import Action

# Stage that sends, "F" for values or "B" for gradients, microbatch.
_Message = tuple[int, str, int]


class Sends:
    """Messages of a rank under way, with the memory of what they carry.

    torch waits for those of schedules with several stages on a rank at the end of a pass, and gloo
    does not tell whether one has arrived. That follows from the order of the ranks' work: whoever
    gets the gradient of a value knows that the value had arrived; whoever gets a value knows that
    the rank it comes from was through with what stands before it in its list.

    Args:
        order: What each rank of the pipeline does; see :mod:`lightning_pipeline.actions`.
        post: Begins operations and gives what to wait for.
        wait: Waits for it.
    """

    def __init__(
        self,
        order: Sequence[Sequence[Action]],
        post: Callable[[Any], list[Any]],
        wait: Callable[[list[Any]], None],
    ) -> None:
        self._post, self._wait = post, wait
        place = {action: at for row in order for at, action in enumerate(row)}
        first_backward = {
            (a.stage, a.microbatch): at for a, at in place.items() if a.op in ("B", "I")
        }
        # For each forward, the gradients that its stage has sent and that have arrived by then.
        self._arrived: dict[tuple[int, int], list[int]] = {
            (a.stage + 1, a.microbatch): [
                m for (s, m), before in first_backward.items() if s == a.stage and before < at
            ]
            for a, at in place.items()
            if a.op == "F"
        }
        self._works: dict[_Message, list[Any]] = {}

    def post(self, message: _Message, operations: Any) -> list[Any]:
        """Sends a message. What is left to do for torch: nothing."""
        self._works[message] = self._post(operations)
        return []

    def wait(self, message: _Message) -> None:
        """Lets go of a message that has arrived; nothing for one that was not sent."""
        self._wait(self._works.pop(message, []))

    def on_forward(self, stage: int, microbatch: int) -> None:
        """Lets go of what must have arrived when a stage can begin a microbatch."""
        for earlier in self._arrived.get((stage, microbatch), ()):
            self.wait((stage, "B", earlier))

    def finish(self) -> None:
        """Waits for all that is under way."""
        for message in list(self._works):
            self.wait(message)
