"""When messages have arrived, which gloo does not tell."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.actions import Action


class Arrivals:
    """What the order of the ranks' work says of messages under way.

    Whoever gets the gradient of a value knows that the value had arrived; whoever gets a value
    knows that the rank it comes from was through with what stands before it in its list, which had
    waited for the gradients that it used.

    Args:
        lists: What each rank of the pipeline computes, in order.
    """

    def __init__(self, lists: Sequence[Sequence[Action]]) -> None:
        place = {action: at for row in lists for at, action in enumerate(row)}
        backward = {(a.stage, a.microbatch): at for a, at in place.items() if a.op in ("B", "I")}
        # For each forward, the gradients that its stage has sent and that have arrived by then.
        self._known: dict[Action, list[int]] = {
            Action(a.stage + 1, "F", a.microbatch): [
                m for (stage, m), before in backward.items() if stage == a.stage and before < at
            ]
            for a, at in place.items()
            if a.op == "F"
        }

    def before(self, forward: Action) -> list[int]:
        """Microbatches whose gradients its stage has sent, and that have arrived when it begins."""
        return self._known.get(forward, [])
