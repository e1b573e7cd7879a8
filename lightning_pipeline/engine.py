"""One pass over the stages of a rank: forwards, backwards and messages in the schedule's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipeline.actions import Action, action_lists
from lightning_pipeline.activities import Observer, Wait
from lightning_pipeline.arrivals import Arrivals
from lightning_pipeline.backward import (
    Deferred,
    has_listeners,
    hooks_made,
    is_worth_fusing,
    split_backward,
    walk_seconds,
)
from lightning_pipeline.boundary import check_planned, cross
from lightning_pipeline.cache import Cache
from lightning_pipeline.lowering import Kind, Transfer, lower, receive_early
from lightning_pipeline.mesh import Mesh
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.splitting.cost import default_rates
from lightning_pipeline.steps import TensorMeta
from lightning_pipeline.threads import calm_gloo
from lightning_pipeline.whereabouts import Position
from lightning_pipeline.wire import Parcel, Wire
from lightning_pipeline.work import Work

# As many as plans: a pass is a few lists, but a run that goes through more shapes in turn than fit
# would make one every step.
_CACHED_PASSES = 256

_SPLIT_LOSS = 0.05
"""By how much a backward in two parts is longer, as a share: that of convolutions and attention."""

_Key = tuple[Kind, int, int]
"""``"F"`` for values and ``"B"`` for gradients, the stage that gets them, and the microbatch."""


@dataclass
class _Frame:
    """What a backward needs of the forward of one stage and microbatch.

    Attributes:
        received: Leaves of its graph, for all values that it got.
        roots: For each value that is sent and wants a gradient, where its backward begins;
            ``None`` if it does not depend on anything.
        deferred: The weight gradients that are yet to be made.
    """

    received: list[Tensor]
    roots: list[GradientEdge | None]
    deferred: Deferred | None = None


@dataclass
class _Order:
    """What this rank does with batches of one kind.

    Attributes:
        steps: Actions and messages.
        last_backward: For each stage, the action behind which its weight gradients are complete.
        arrivals: What follows about the messages under way.
        hops: Number of ranks that a gradient goes through, but for the first.
        sends_back: Stages of this rank that send gradients to another one.
        metas: What the stages of this rank, and those behind them, receive of each microbatch.
        parcels: What travels to and from this rank, values and gradients.
        manners: For each stage, how a whole backward is run in two parts, if it is.
    """

    steps: list[Action | Transfer]
    last_backward: dict[int, Action]
    arrivals: Arrivals
    hops: int
    sends_back: frozenset[int]
    metas: dict[tuple[int, int], list[TensorMeta]] = field(default_factory=dict)
    parcels: dict[_Key, Parcel] = field(default_factory=dict)
    manners: dict[int, dict[str, bool] | None] = field(default_factory=dict)


class Engine:
    """Runs passes over this rank's stages.

    Args:
        mesh: The rank's place.
        schedule: The training schedule.
        stages_per_rank: Number of stages of each rank.
        device: The rank's device.

    Attributes:
        observer: Is told what training passes do from now on; ``None``: nobody is.
        position: What the rank does at the moment.
    """

    def __init__(
        self, mesh: Mesh, schedule: Schedule, stages_per_rank: int, device: torch.device
    ) -> None:
        self._mesh, self._schedule, self._device = mesh, schedule, device
        self._stages_per_rank = stages_per_rank
        self._num_ranks = len(mesh.pipeline_ranks)
        self._num_stages = self._num_ranks * stages_per_rank
        self._orders: Cache[_Order] = Cache(_CACHED_PASSES)
        self._wire = Wire(mesh.pipeline_group)
        self._hooked: set[int] = set()
        self.observer: Observer | None = None
        self.position = Position()

    def run(self, work: Work) -> None:
        """Runs all microbatches of ``work`` forward, and backward if it trains.

        Every rank of the pipeline calls it with the same batch. Gradients add up in ``.grad``.
        """
        key = (work.trains, work.num_microbatches, work.key)
        order = self._orders.get(key, lambda: self._build(work))
        tell: Observer = self.position.note
        if self.observer is not None and work.trains:
            tell = self.position.also(self.observer)
        _Pass(order, work, self._wire, self._num_stages, self._device, self._hooked, tell).run()
        self.position.activity = None  # it keeps the place of an error

    def clear(self) -> None:
        """Forgets all orders."""
        self._orders.clear()

    def _build(self, work: Work) -> _Order:
        sizes = self._num_ranks, self._stages_per_rank, work.num_microbatches
        lists = action_lists(self._schedule, *sizes) if work.trains else self._forwards(*sizes)
        steps = lower(lists, self._num_stages)[self._mesh.pipeline_rank]
        if self._wire.by_tag:
            calm_gloo()  # some of its threads may have been without a name when they began
            steps = receive_early(steps)
        if work.trains:
            own = self._mesh.stages
            self._hooked.update(s for s in own if has_listeners(work.parameters(s)))
        last = {a.stage: a for a in steps if isinstance(a, Action) and a.op in "BW"}
        back = (s for s in steps if isinstance(s, Transfer) and s.sends and s.kind == "B")
        sends_back = frozenset(step.stage + 1 for step in back)
        order = _Order(steps, last, Arrivals(lists), self._num_ranks - 1, sends_back)
        stages = {s + behind for s in self._mesh.stages for behind in (0, 1)}
        for stage in sorted(stages - {self._num_stages}):
            for microbatch in range(work.num_microbatches):
                metas = work.boundary(stage, microbatch) if stage else []
                order.metas[stage, microbatch] = metas
                order.parcels["F", stage, microbatch] = Parcel(metas)
                trained = [meta for meta in metas if meta.requires_grad]
                order.parcels["B", stage - 1, microbatch] = Parcel(trained)
        return order

    def _forwards(self, ranks: int, per_rank: int, microbatches: int) -> list[list[Action]]:
        """All forwards, stage after stage on every rank."""
        held = [self._schedule.stages_of_rank(rank, ranks, per_rank) for rank in range(ranks)]
        return [
            [Action(stage, "F", m) for stage in sorted(stages) for m in range(microbatches)]
            for stages in held
        ]


class _Pass:
    """One batch on its way through this rank.

    Args:
        order: What to do.
        work: The batch.
        wire: The way to other ranks.
        num_stages: Number of stages of the pipeline.
        device: The rank's device.
        hooked: Stages whose forward has registered hooks, to be added to.
        tell: Is told what the pass does from now on.
    """

    def __init__(
        self,
        order: _Order,
        work: Work,
        wire: Wire,
        num_stages: int,
        device: torch.device,
        hooked: set[int],
        tell: Observer,
    ) -> None:
        self._order, self._work, self._wire = order, work, wire
        self._hooked, self.tell = hooked, tell
        self._num_stages, self._device = num_stages, device
        self._frames: dict[tuple[int, int], _Frame] = {}
        # tensors for a stage of this rank, made here or on their way
        self._here: dict[_Key, list[Tensor]] = {}
        self._coming: dict[_Key, tuple[list[Tensor], list[Any]]] = {}
        self._going: dict[_Key, tuple[list[Tensor], list[Any]]] = {}
        self._current: Action | None = None
        self._left: Deferred | None = None

    def run(self) -> None:
        """Does everything, and waits for what is under way."""
        run: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_backward,
            "W": self._weight_backward,
        }
        is_checked = False
        for step in self._order.steps:
            if isinstance(step, Transfer):
                if not is_checked:
                    self.tell(Wait("batch"))
                    self._work.before_messages()
                    is_checked = True
                self.tell(step)
                (self._send if step.sends else self._receive)(step)
                continue
            self._end_action()
            self._current = step
            self.tell(step)
            run[step.op](step)
        self._end_action()
        self.tell("else")
        for key in list(self._going):
            self._arrived(key)

    def _end_action(self) -> None:
        """Does what is left of the last action when what others wait for is on its way."""
        action, self._current = self._current, None
        if action is None:
            return
        if self._left is not None:
            self.tell(action._replace(op="W"))
            with torch.autocast(self._device.type, enabled=False):
                self._left.run()
            self._left = None
        if self._order.last_backward.get(action.stage) == action:
            self.tell("exchange begins")
            self._work.finished(action.stage)

    # messages

    def _tag(self, kind: str, stage: int, microbatch: int) -> int:
        direction = 0 if kind == "F" else 1
        return (microbatch * self._num_stages + stage) * 2 + direction

    def _send(self, transfer: Transfer) -> None:
        key = transfer.kind, transfer.stage, transfer.microbatch
        messages = self._order.parcels[key].pack(self._here.pop(key))
        self._going[key] = messages, self._wire.send(messages, transfer.peer, self._tag(*key))

    def _receive(self, transfer: Transfer) -> None:
        key = transfer.kind, transfer.stage, transfer.microbatch
        messages = self._order.parcels[key].empty(self._device)
        self._coming[key] = messages, self._wire.receive(messages, transfer.peer, self._tag(*key))

    def _take(self, kind: Kind, action: Action) -> list[Tensor]:
        """What has been made for an action of this rank."""
        key = kind, action.stage, action.microbatch
        if key in self._here:
            return self._here.pop(key)
        messages, handles = self._coming.pop(key)
        self.tell(Wait(*key))
        for handle in handles:
            handle.wait()
        self.tell(action)
        return self._order.parcels[key].unpack(messages)

    def _arrived(self, key: _Key) -> None:
        """Lets go of a message of which it is known that it has arrived."""
        for handle in self._going.pop(key, ((), ()))[1]:
            handle.wait()

    # actions

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        for earlier in self._order.arrivals.before(action):
            self._arrived(("B", stage - 1, earlier))
        metas = self._order.metas[stage, microbatch]
        received: list[Tensor] = []
        if stage:
            for tensor, meta in zip(self._take("F", action), metas, strict=True):
                received.append(tensor.detach().requires_grad_(meta.requires_grad))
        hooks = hooks_made()
        out = self._work.forward(stage, microbatch, tuple(map(cross, received)))
        if hooks_made() != hooks:
            self._hooked.add(stage)
        if stage == self._num_stages - 1:
            values, wanted = [out], [True]
        else:
            sent = self._order.metas[stage + 1, microbatch]
            check_planned(stage, out, sent)
            values, wanted = out, [meta.requires_grad for meta in sent]
            self._here["F", stage + 1, microbatch] = [value.detach() for value in out]
        if self._work.trains:
            roots = [
                get_gradient_edge(value) if value.requires_grad else None
                for value, wants in zip(values, wanted, strict=True)
                if wants
            ]
            self._frames[stage, microbatch] = _Frame(received, roots)
            if stage == self._num_stages - 1:
                factor = self._work.loss_factor(microbatch)
                self._here["B", stage, microbatch] = [_of_kind(out, factor)]

    def _roots(self, action: Action) -> list[tuple[GradientEdge, Tensor]]:
        """Where the backward begins, with the gradients there."""
        stage, _, microbatch = action
        self._arrived(("F", stage + 1, microbatch))  # its gradient comes back
        grads = self._take("B", action)
        roots = self._frames[stage, microbatch].roots
        return [(root, g) for root, g in zip(roots, grads, strict=True) if root is not None]

    def _backward(self, action: Action) -> None:
        roots = self._roots(action)
        frame = self._frames.pop(action[::2])
        if not roots:
            self._give_back(action, [None] * len(frame.received))
            return
        with torch.autocast(self._device.type, enabled=False):
            manner = self._manner(action.stage, [edge for edge, _ in roots])
            if manner is not None:
                self._left = self._split(action, frame, roots, **manner)
                return
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        self._give_back(action, [leaf.grad for leaf in frame.received])

    def _manner(self, stage: int, edges: list[GradientEdge]) -> dict[str, bool] | None:
        """How a whole backward is run in two parts, ``None`` if it is not.

        The stage before gets its gradients between the two, so that what each stage adds to the
        way back through the pipeline is its first part alone.
        """
        known = self._order.manners
        if stage in self._hooked:
            return None
        if stage not in known:
            walk = walk_seconds(edges)
            seconds, microbatches = self._work.seconds(stage), self._work.num_microbatches
            gained = self._order.hops * seconds / 3
            lost = microbatches * (_SPLIT_LOSS * seconds * 2 / 3 + walk)
            early = stage in self._order.sends_back and gained > lost
            fused = is_worth_fusing(edges, default_rates(self._device).bytes)
            known[stage] = {"products_alone": not early} if early or fused else None
        return known[stage]

    def _input_backward(self, action: Action) -> None:
        roots = self._roots(action)
        frame = self._frames[action[::2]]
        with torch.autocast(self._device.type, enabled=False):
            frame.deferred = self._split(action, frame, roots)
        frame.received, frame.roots = [], []

    def _split(
        self, action: Action, frame: _Frame, roots: list[tuple[GradientEdge, Tensor]], **how: bool
    ) -> Deferred:
        leaves = [leaf for leaf in frame.received if leaf.requires_grad]
        whole = action.stage in self._hooked
        grads, deferred = split_backward(roots, leaves, whole=whole, **how)
        found = iter(grads)
        self._give_back(action, [next(found) if t.requires_grad else None for t in frame.received])
        return deferred

    def _weight_backward(self, action: Action) -> None:
        deferred = self._frames.pop(action[::2]).deferred
        assert deferred is not None, f"{action} comes before the gradient of its stage's inputs"
        with torch.autocast(self._device.type, enabled=False):
            deferred.run()

    def _give_back(self, action: Action, grads: list[Tensor | None]) -> None:
        stage, _, microbatch = action
        if not stage:
            return
        self._work.returned(stage, microbatch, tuple(grads))
        metas = self._order.metas[stage, microbatch]
        self._here["B", stage - 1, microbatch] = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=self._device) if grad is None else grad
            for meta, grad in zip(metas, grads, strict=True)
            if meta.requires_grad
        ]


def _of_kind(like: Tensor, number: float | Tensor) -> Tensor:
    """A single number with the dtype and on the device of ``like``."""
    if isinstance(number, Tensor):
        return number.to(like.device, like.dtype)
    return torch.full((), number, dtype=like.dtype, device=like.device)
