"""What a rank does in a step, from one moment to the next, and the clock that it is noted by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch

from lightning_pipeline.actions import Action
from lightning_pipeline.lowering import Transfer


class Wait(NamedTuple):
    """Waiting for other ranks.

    Attributes:
        kind: ``"F"`` for the values and ``"B"`` for the gradients of a message; ``"batch"`` for the
            word of all ranks that they have begun with the same batch.
        stage: The stage that the message goes to; -1 for none.
        microbatch: Index of its microbatch; -1 for none.
    """

    kind: Literal["F", "B", "batch"]
    stage: int = -1
    microbatch: int = -1


Phase = Literal["exchange begins", "exchange ends", "optimizer", "else"]
"""What is no action and no message: a stage's gradients are sent to the replicas, the exchange is
waited for, the optimizer's step with clipping, and all the rest."""

Activity: TypeAlias = Action | Transfer | Wait | Phase
Observer: TypeAlias = Callable[[Activity], None]
"""Is told what the rank does from now on; the computing of an action goes on behind a wait."""

Mark: TypeAlias = tuple[float, Activity]
"""A moment on the rank's monotonic clock, in seconds, and what it did from then on."""


class Recorder:
    """Notes what the rank does, by the host's monotonic clock."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def __call__(self, activity: Activity) -> None:
        """Notes that ``activity`` begins, and that what was before it ends."""
        self._marks.append((time.monotonic(), activity))

    def stop(self) -> list[Mark]:
        """Ends the recording and returns it; the last mark is the end of the one before."""
        self("else")
        return self._marks


class EventRecorder(Recorder):
    """Notes when the device gets to what the rank does, by events on its current stream.

    Nothing waits for the device before the end of the recording, which waits once and so finds the
    host's time of all events. A wait for a message is one of the stream.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._events: list[tuple[torch.cuda.Event, Activity]] = []

    def __call__(self, activity: Activity) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append((event, activity))

    def stop(self) -> list[Mark]:
        """As for `Recorder`; waits for the device."""
        self("else")
        last = self._events[-1][0]
        last.synchronize()
        now = time.monotonic()
        return [(now - event.elapsed_time(last) / 1e3, what) for event, what in self._events]


def make_recorder(device: torch.device) -> Recorder:
    """The recorder for a rank's device."""
    return EventRecorder(device) if device.type == "cuda" else Recorder()
