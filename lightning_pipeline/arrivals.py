"""When messages have arrived, which gloo does not tell."""

from __future__ import annotations

from collections import defaultdict
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
        self._known: dict[Action, list[int]] = {}
        for row in lists:
            new: dict[int, list[int]] = defaultdict(list)
            for action in row:
                if action.op in ("B", "I"):
                    new[action.stage].append(action.microbatch)
                elif action.op == "F":
                    after = Action(action.stage + 1, "F", action.microbatch)
                    self._known[after] = new.pop(action.stage, [])

    def before(self, forward: Action) -> list[int]:
        """Microbatches whose gradients have arrived when it begins, since the forward before.

        They are gradients that its own stage has sent.
        """
        return self._known.get(forward, [])
