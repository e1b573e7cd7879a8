"""What opened forwards read and change besides tensors, while they are recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipeline.splitting.ambient import outside_state, seeds
from lightning_pipeline.splitting.frames import PACKAGE_DIRECTORY, definition_location
from lightning_pipeline.splitting.pictures import GENERATORS, Change
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.settings import frozen
from lightning_pipeline.splitting.tape import RecordingError, Tape, holds_tensor
from lightning_pipeline.splitting.torch_private import pytree
from lightning_pipeline.splitting.watch import (
    ABSENT,
    ALL,
    HOOKS,
    TRAINER,
    Place,
    class_value,
    is_plain,
    is_property,
    is_setting,
)

_MODULE_FILE = sys.modules[nn.Module.__module__].__file__


class Effects:
    """Notes the attributes that opened modules read, and what they change.

    Args:
        sandbox: The open sandbox around the recorded module.
        tape: Knows which module runs.

    Attributes:
        reads: Attributes whose values the recording depends on.
        others: Modules outside of the recorded one that were read, by the names given to them.
    """

    def __init__(self, sandbox: Sandbox, tape: Tape) -> None:
        self._sandbox, self._tape, self._below = sandbox, tape, sandbox.picture.below()
        self.reads: dict[Place, None] = {}
        self.others: dict[str, nn.Module] = {}
        self._touched: set[Place] = set()
        self._written: set[Place] = set()
        self._changes: list[Change] = []
        self._errors: list[tuple[Place, RecordingError]] = []

    def begin(self) -> None:
        """Notes how things are when the outermost forward begins."""
        # A second normal number that NumPy keeps would be drawn without a trace.
        np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 0})
        self._outside, self._seeds = outside_state(), seeds()

    # ---- reads

    def read(self, original: Callable[..., Any], module: nn.Module, name: str, inside: bool) -> Any:
        """Reads an attribute of a module.

        Args:
            original: Does it.
            module: The module.
            name: The attribute.
            inside: Whether a module that stays whole reads it, at run time again.
        """
        reader = sys._getframe(3).f_code.co_filename
        if not is_setting(name) or reader.startswith(PACKAGE_DIRECTORY):
            return original(module, name)
        if name == ALL and reader == _MODULE_FILE:
            return original(module, name)  # on the way to a weight or submodule
        place = self._name_of(module), name
        if inside:
            self._touched.add(place)
            return original(module, name)
        if name == ALL or not is_property(class_value(type(module), name)):
            self._note(place)
            return original(module, name)
        return self._property(lambda: original(module, name), place)

    def read_trainer(self, original: Callable[..., Any], trainer: Any, name: str) -> Any:
        """Reads an attribute of the Trainer, as one of the LightningModule's."""
        if name.startswith("_"):
            return original(trainer, name)
        value = self._property(lambda: original(trainer, name), ("", TRAINER + name))
        return value

    def _note(self, place: Place) -> None:
        if place not in self._written:
            self.reads[place] = None
            self._touched.add(place)

    def _property(self, run: Callable[[], Any], place: Place) -> Any:
        """A value that is computed counts by itself, or else what it is computed from."""
        before, self.reads = self.reads, {}
        try:
            value = run()
        finally:
            inner, self.reads = self.reads, before
        if is_plain(value):
            self._note(place)
        else:
            self.reads.update(inner)
        return value

    def _name_of(self, module: nn.Module) -> str:
        name = self._sandbox.names.get(id(module))
        if name is None:
            name = f"<{type(module).__name__} {id(module)}>"
            self.others[name] = module
        return name

    # ---- changes

    def assigned(self, place: Place, old: Any, value: Any) -> None:
        """Notes that an opened forward sets an attribute of a module.

        Args:
            place: The attribute.
            old: What it was.
            value: What it is going to be.
        """
        tensors = holds_tensor(value) or holds_tensor(old)
        if not tensors and frozen(old) != frozen(value):
            self._errors.append((place, self._error(self._tape.stack[-1], place[1])))
        self._written.add(place)

    def check(self, name: str) -> None:
        """Notes what the code of module ``name`` has changed since the last check.

        Raises:
            RecordingError: It has drawn or seeded random numbers.
        """
        changes = self._below.changes()
        if changes:
            found = changes[0]
            self._changes += changes
            error = self._error(name, found.attribute)
            self._errors.append(((found.module, found.attribute), error))
        self.check_draws(name)

    def check_draws(self, name: str) -> None:
        """The second half of :meth:`check`, for each operation."""
        if seeds() != self._seeds:
            raise self._tape.fail(
                "it seeds torch's random generator, which a recording would do only once",
                "Seed in a hook, draw from a torch.Generator that is an attribute, or move this "
                "code into a submodule",
                module=name,
            )
        outside, before = outside_state(), self._outside
        if outside == before:
            return
        self._outside = outside
        error = self._tape.fail(
            "it draws from Python's or NumPy's random generator, which a recording would freeze",
            "Draw with torch inside a submodule, or move this code into one",
            module=name,
        )
        error.draws = True
        raise error

    def generators(self, arguments: Any) -> frozenset[int]:
        """Identities of the generators of random numbers among the arguments of an operation.

        Raises:
            RecordingError: The forward has made one, which would not be made again.
        """
        found = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Generator)]
        known = {id(holder) for holder in self._sandbox.picture.holders()} if found else ()
        if any(id(generator) not in known for generator in found):
            raise self._tape.fail(
                "it draws from a torch.Generator that is no attribute of a module",
                "Make it an attribute, or move this code into a submodule",
            )
        return frozenset(map(id, found))

    def pass_over(self) -> bool:
        """Lets a module that stays whole have changed what it likes; it will do so at run time.

        Returns:
            Whether it has drawn from Python's or NumPy's generator.
        """
        self._below.changes()
        before, self._outside, self._seeds = self._outside, outside_state(), seeds()
        return self._outside != before

    def _error(self, module: str, attribute: str) -> RecordingError:
        return self._tape.fail(
            f"its forward changes {attribute!r}, which a recording would do only once",
            "Return what it collects, count in a buffer, or change it in a hook",
            definition_location(self._sandbox.module.get_submodule(module)),
            module,
        )

    def finish(self, is_whole: Callable[[str], bool]) -> tuple[list[RecordingError], list[Change]]:
        """What the recording would do once only, and each call anew.

        Args:
            is_whole: Whether a module, of a name, runs as it is.

        Returns:
            The errors that this makes, and the changes.
        """
        changes = list(self._changes)
        errors = [error for place, error in self._errors if not self._is_harmless(place)]
        for change in self._sandbox.picture.changes():
            place = change.module, change.attribute
            if change.attribute in HOOKS:
                changes.append(change)
            own = isinstance(change.holder, nn.Module) and not is_whole(change.module)
            if not own or holds_tensor(change.after) or self._is_harmless(place):
                continue
            changes.append(change)
            if place not in self._written:  # past ``__setattr__``
                errors.append(self._error(*place))
        return errors, changes

    def _is_harmless(self, place: Place) -> bool:
        """Whether an attribute was set before anybody read it: it says nothing to a later call."""
        if place not in self._written:
            return False
        return not {place, (place[0], ALL)} & self._touched


def installs_hooks(changes: list[Change]) -> bool:
    """Whether a forward has given modules hooks, which serve it alone."""
    return any(change.attribute in HOOKS for change in changes)


def can_be_kept(changes: list[Change]) -> bool:
    """Whether what a forward has changed can last: neither stand-ins nor what it has drawn."""
    return not any(
        isinstance(change.holder, GENERATORS)
        or (change.after is not ABSENT and holds_tensor(change.after))
        for change in changes
    )
