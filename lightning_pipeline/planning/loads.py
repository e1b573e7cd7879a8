"""What a part of a recorded step does and keeps for one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_pipeline.splitting import CPU_RATES
from lightning_pipeline.splitting.cost import Work
from lightning_pipeline.steps import TensorMeta
from lightning_pipeline.steps.analyst import Analysis
from lightning_pipeline.steps.call import Call


@dataclass(frozen=True)
class Load:
    """What a stage does and keeps for one microbatch.

    Attributes:
        forward: Work of the forward.
        backward: Work of the whole backward.
        weight: Work of the part of the backward that makes gradients of weights.
        saved: Bytes that autograd saves and that came in, weights aside.
        deferred: Bytes that are kept from the first to the second half of a split backward.
        received: Bytes that come in.
        largest: Bytes that its largest piece saves: what a backward has in hand besides.
        own: Bytes of ``saved`` that the step's own code saves, which is never recomputed.
    """

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    weight: Work = field(default_factory=Work)
    saved: float = 0.0
    deferred: float = 0.0
    received: float = 0.0
    largest: float = 0.0
    own: float = 0.0

    def between(self, other: Load, share: float) -> Load:
        """The load that is ``share`` of the way to ``other``, beyond it above 1."""

        def mix(a: float, b: float) -> float:
            return max(0.0, a + share * (b - a))

        def mixed(a: Work, b: Work) -> Work:
            pairs = ((getattr(a, name), getattr(b, name)) for name in Work.__dataclass_fields__)
            return Work(*(mix(*pair) for pair in pairs))

        return Load(
            mixed(self.forward, other.forward),
            mixed(self.backward, other.backward),
            mixed(self.weight, other.weight),
            *(
                mix(getattr(self, name), getattr(other, name))
                for name in ("saved", "deferred", "received", "largest", "own")
            ),
        )


def added(loads: Sequence[Load]) -> Load:
    """What parts do and keep together."""
    return Load(
        sum((load.forward for load in loads), Work()),
        sum((load.backward for load in loads), Work()),
        sum((load.weight for load in loads), Work()),
        sum(load.saved for load in loads),
        sum(load.deferred for load in loads),
        sum(load.received for load in loads),
        max(load.largest for load in loads),
        sum(load.own for load in loads),
    )


def part_of(call: Call, seen: Analysis, low: int, high: int) -> Load:
    """What a stage does of one call, and what it keeps of it.

    What comes in is kept for the backward, too: values of a call that has begun, and what a call
    that is over has given.

    Args:
        call: The call.
        seen: What is known of it.
        low: First piece of the stage.
        high: One past its last piece.
    """
    if low == call.num_pieces:
        given = sum(out.nbytes for out in call.outputs if isinstance(out, TensorMeta))
        return Load(saved=given, received=given)
    program = seen.program
    if program is None:  # it could not be recorded: its seconds were guessed
        return Load() if low == high else _unknown(call)
    if not seen.cuttable:
        low, high = (0, program.num_pieces) if high > low else (0, 0)
    values = program.values
    came = program.live[low] if low else []
    # What comes from no other call is the batch, which is there anyway.
    batch = set() if call.depends_on else {values[value].storage for _, value in program.inputs}
    kept = {values[value].storage: values[value].nbytes for value in came}
    received, deferred, largest = sum(kept.values()), 0.0, 0.0
    for piece in range(low, high):
        node = program.nodes[program.pieces[piece]]
        saved = {s: size for s, size in node.saved.items() if s not in batch}
        kept.update(saved)
        own = sum(saved.values())
        largest = max(largest, own)
        if program.work[piece].weight != Work():
            # What went into its products, and the gradients of what came out.
            deferred += own + sum(values[value].nbytes for _, value in node.outputs)
    work = program.work[low:high]
    return Load(
        sum((piece.forward for piece in work), Work()),
        sum((piece.backward for piece in work), Work()),
        sum((piece.weight for piece in work), Work()),
        float(sum(kept.values())),
        deferred,
        float(received),
        largest,
    )


def _unknown(call: Call) -> Load:
    """A call in one piece of which only a guess of its time and its output are known."""
    third = Work(bytes=sum(call.cost) / 3 * CPU_RATES.bytes)
    kept = float(sum(out.nbytes for out in call.outputs if isinstance(out, TensorMeta)))
    return Load(third, third + third, third, kept, 2 * kept, 0.0, kept)
