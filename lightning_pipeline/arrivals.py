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
        used: dict[int, list[int]] = defaultdict(list)  # gradients, in the order of their use
        count: dict[Action, int] = {}  # how many of them, by the forward that follows
        for row in lists:
            for stage, op, microbatch in row:
                if op == "F":
                    count[Action(stage + 1, "F", microbatch)] = len(used[stage])
                elif op in ("B", "I"):
                    used[stage].append(microbatch)
        known: dict[int, int] = defaultdict(int)
        self._new: dict[Action, list[int]] = {}
        for action in (action for row in lists for action in row if action in count):
            last, known[action.stage] = known[action.stage], max(known[action.stage], count[action])
            self._new[action] = used[action.stage - 1][last : known[action.stage]]

    def before(self, forward: Action) -> list[int]:
        """Microbatches whose gradients its stage has sent, and that have arrived when it begins.

        Those that an earlier forward of the stage has told are left out.
        """
        return self._new.get(forward, [])
