"""Whether plans still hold: what recorded forwards have read is what it was when they were made."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeline.cache import Cache
from lightning_pipeline.splitting.watch import Place, Watch
from lightning_pipeline.steps import StepPlan

PLANS_IN_A_ROW = 8
"""New plans of the same step for the same shapes, one after the other, before a warning."""

_CACHED = 256
_VERSIONS = 8  # plans of equal shapes, for other values of what forwards read


class Plans:
    """The plans of one LightningModule, each with the attributes that it depends on.

    They are looked at once a batch.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._watch = module, Watch(module, ())
        self._cache: Cache[StepPlan] = Cache(_CACHED, _VERSIONS)
        self._guards: WeakKeyDictionary[StepPlan, dict[Place, Hashable]] = WeakKeyDictionary()
        self._holds_at: WeakKeyDictionary[StepPlan, int] = WeakKeyDictionary()
        self._moment, self._mark = self._watch.look(), 0
        self._values: dict[Place, Hashable] = {}
        self._changed: Place | None = None
        self._in_a_row: dict[Hashable, tuple[int, int]] = {}
        self._num_looks, self._told = 0, False

    def look(self) -> tuple[int, str]:
        """Looks at everything.

        Returns:
            A checksum of all changes so far, equal on all ranks that have seen the same, and the
            name of the attribute that has changed last.
        """
        self._num_looks += 1
        self._note_changes()
        return self._mark, _path(self._changed) if self._changed is not None else ""

    def _note_changes(self) -> None:
        moment = self._watch.look()
        if moment != self._moment:
            self._moment, before, self._values = moment, self._values, self._watch.values
            changes = [
                (number, list(_differences(before[place], now)))
                for number, (place, now) in enumerate(self._values.items())
                if place in before and before[place] != now
            ]
            if changes:
                self._changed = list(self._values)[changes[0][0]]
                self._mark = zlib.crc32(repr(changes).encode(errors="replace"), self._mark)

    def get(self, step: str, key: Hashable, make: Callable[[], StepPlan]) -> tuple[StepPlan, bool]:
        """The plan of a step that holds now, and whether it is new and has to be guarded.

        Args:
            step: Name of the step.
            key: What plans depend on besides what forwards read.
            make: Makes a plan.
        """
        made: list[StepPlan] = []

        def new() -> StepPlan:
            made.append(make())
            return made[0]

        plan = self._cache.get(key, new, self._holds)
        self._count(step, key, bool(made))
        return plan, bool(made)

    def guard(self, plan: StepPlan, set_by_step: Iterable[str]) -> None:
        """Notes what a new plan depends on.

        What the step itself sets before a call is left out, for it will set it again.

        Args:
            plan: The plan, made just now.
            set_by_step: Attributes of the LightningModule that a step carries.
        """
        names = {id(child): name for name, child in self._module.named_modules()}
        wanted: dict[Place, Hashable] = {}
        for call in plan.calls:
            parent, _, key = call.name.rpartition(".")
            if call.name:
                wanted.setdefault((parent, key), None)
            if call.program is None:
                continue
            others = call.program.others
            self._watch.add((), {n: m for n, m in others.items() if id(m) not in names})
            for (where, attribute), then in call.program.settings.items():
                if where in others:
                    where = names.get(id(others[where]), where)
                else:
                    where = ".".join(part for part in (call.name, where) if part)
                if where or attribute not in set_by_step:
                    wanted[where, attribute] = then
        self._watch.add(wanted, {})
        self._note_changes()
        now = self._watch.values
        self._guards[plan] = {
            place: now[place]
            for place, then in wanted.items()
            if then is None or now[place] == then
        }
        self._holds_at[plan] = self._moment

    def _holds(self, plan: StepPlan) -> bool:
        if self._holds_at[plan] == self._moment:
            return True
        for place, then in self._guards[plan].items():
            if self._watch.values[place] != then:
                self._changed = place
                return False
        self._holds_at[plan] = self._moment
        return True

    def _count(self, step: str, key: Hashable, is_new: bool) -> None:
        """Warns, once, of a step that needs a new plan for each batch."""
        count, last = self._in_a_row.get(key, (-1, 0))
        if not is_new and last == self._num_looks:
            return  # another microbatch of the same batch
        count = count + 1 if is_new else 0
        self._in_a_row.pop(key, None)
        self._in_a_row[key] = count, self._num_looks
        if len(self._in_a_row) > _CACHED:
            del self._in_a_row[next(iter(self._in_a_row))]  # the one seen longest ago
        if count < PLANS_IN_A_ROW or self._told or self._changed is None:
            return
        self._told = True
        rank_zero_warn(
            f"{step} was planned anew for {count} batches in a row, because a forward reads "
            f"{_path(self._changed)}, which changes from batch to batch. This is exact, but slow: "
            "pass the value to the forward as a tensor, or keep it in a buffer."
        )


def _path(place: Place) -> str:
    return ".".join(part for part in ("self", *place) if part)


def _differences(then: Hashable, now: Hashable) -> Iterator[Hashable]:
    """The parts of what is frozen that are other ones now."""
    if isinstance(then, tuple) and isinstance(now, tuple) and len(then) == len(now):
        for old, new in zip(then, now, strict=True):
            yield from _differences(old, new)
    elif then != now:
        yield now
