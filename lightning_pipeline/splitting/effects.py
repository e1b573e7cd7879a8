"""What opened forwards read and change besides tensors, while they are recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_pipeline.splitting.frames import PACKAGE_DIRECTORY
from lightning_pipeline.splitting.pictures import GENERATORS, Change
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.settings import frozen
from lightning_pipeline.splitting.tape import RecordingError, holds_tensor
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

    Attributes:
        reads: Attributes whose values the recording depends on.
        others: Modules outside of the recorded one that were read, by the names given to them.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._picture = sandbox, sandbox.picture
        self.reads: dict[Place, None] = {}
        self.others: dict[str, nn.Module] = {}
        self._touched: set[Place] = set()
        self._written: set[Place] = set()
        self._changes: list[Change] = []
        self._errors: list[tuple[Place, RecordingError]] = []

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

    def assigned(self, place: Place, old: Any, value: Any, fail: Callable[[], Any]) -> None:
        """Notes that an opened forward sets an attribute of a module.

        Args:
            place: The attribute.
            old: What it was.
            value: What it is going to be.
            fail: Makes the error for the case that it matters.
        """
        tensors = holds_tensor(value) or holds_tensor(old)
        if not tensors and frozen(old) != frozen(value):
            self._errors.append((place, fail()))
        self._written.add(place)

    def look(self, fail: Callable[[str], RecordingError] | None) -> None:
        """Notes what has changed since the last look.

        Args:
            fail: Makes the error for an attribute, if opened forwards have run since.
        """
        changes = self._picture.changes(below=True)
        if not changes:
            return
        if fail is not None:
            self._changes += changes
            found = changes[0]
            self._errors.append(((found.module, found.attribute), fail(found.attribute)))
        self._picture = self._picture.again()

    def finish(
        self, is_whole: Callable[[str], bool], fail: Callable[[str, str], RecordingError]
    ) -> tuple[list[RecordingError], list[Change]]:
        """What the recording would do once only, and each call anew.

        Args:
            is_whole: Whether a module, of a name, runs as it is.
            fail: Makes the error for an attribute of a module.

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
                errors.append(fail(*place))
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
