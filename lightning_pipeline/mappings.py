"""Copies of mappings of any class, with other values."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

from lightning_pipeline.errors import StepError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)  # one object may stand for many


def with_values(mapping: MutableMapping[Any, Any], values: list[Any]) -> Any:
    """A mapping of a kind that torch does not know, such as a tokenizer's output.

    Its data may lie in dicts or attributes of its own, and its keys may be attributes too.

    Raises:
        StepError: If the copy does not have these values, or keeps others of the mapping.
    """
    old = dict(zip(mapping, mapping.values(), strict=True))
    pairs = list(zip(old.values(), values, strict=True))
    new_of = {id(before): after for before, after in pairs if type(before) not in _PLAIN}
    wanted = {
        key: new_of.get(id(before), after) for key, (before, after) in zip(old, pairs, strict=True)
    }
    uncut = {id(before) for before, _ in pairs if new_of.get(id(before), before) is not before}
    try:
        made = _copied(mapping, new_of)
        for key, value in wanted.items():
            if made[key] is not value:
                made[key] = value
        same = all(made[key] is value for key, value in wanted.items())
        for key, value in old.items():
            if mapping[key] is not value:  # the copy has written to the data of both
                mapping[key], same = value, False
        same = same and not any(id(inside) in uncut for inside in _inside(made))
    except Exception as error:
        raise _no_copy(mapping, f"copying it raised {error!r}") from error
    if not same:
        raise _no_copy(mapping, "its values are also kept where they are not found")
    return made


def _copied(mapping: MutableMapping[Any, Any], new_of: dict[int, Any]) -> Any:
    """A copy with the new values wherever the old ones were; nothing else that matters is shared.

    Args:
        mapping: The mapping.
        new_of: New values by the identity of the old ones.
    """
    made = copy.copy(mapping)
    memo = {id(inside): inside for inside in _inside(mapping) if not _holds(inside)}
    memo |= {**new_of, id(mapping): made}
    attributes = getattr(made, "__dict__", {})
    if getattr(mapping, "__dict__", None) is mapping:
        made.__dict__ = made  # type: ignore[assignment]  # its keys are its attributes
    else:
        for name, value in attributes.items():
            attributes[name] = copy.deepcopy(value, memo)
    for name in _slots(made):
        object.__setattr__(made, name, copy.deepcopy(getattr(made, name), memo))
    return made


def _no_copy(mapping: Any, reason: str) -> StepError:
    return StepError(
        f"A batch is, or holds, a {type(mapping).__name__}, which cannot be cut into microbatches: "
        f"{reason}. Make it a plain dict, dict(batch), in LightningModule.on_after_batch_transfer "
        "or the DataLoader's collate_fn."
    )


def _holds(value: Any) -> bool:
    """Whether a mapping may keep its data in such an object."""
    return isinstance(value, (MutableMapping, list, tuple, set))


def _inside(mapping: Any) -> Iterator[Any]:
    """Everything that can be reached in a mapping of any class, but not in what it holds."""
    todo, seen = [mapping], {id(mapping): mapping}  # kept alive: their ids are not used again
    while todo:
        item = todo.pop()
        found = [*getattr(item, "__dict__", {}).values()]
        found += [getattr(item, name) for name in _slots(item)]
        if isinstance(item, MutableMapping):
            found += item.values()
        elif isinstance(item, (list, tuple, set)):
            found += item
        for value in found:
            if id(value) not in seen:
                seen[id(value)] = value
                yield value
                if _holds(value):
                    todo.append(value)


def _slots(item: Any) -> list[str]:
    """Attributes of an object that are not in its ``__dict__``."""
    names: list[str] = []
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name[:2] != "__" and hasattr(item, name)]
