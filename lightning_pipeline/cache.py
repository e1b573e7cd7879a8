"""A memory that forgets what has not been used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Cache(Generic[Item]):
    """Keeps the results of the last ``size`` different keys.

    Ranks of one pipeline ask for the same keys in the same order, so they forget alike.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[Hashable, Item] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Item]) -> Item:
        """The item of ``key``, made if it is not known."""
        if key not in self._items:
            self._items[key] = make()
            if len(self._items) > self._size:
                self._items.popitem(last=False)
        self._items.move_to_end(key)
        return self._items[key]

    def forget(self, key: Hashable) -> None:
        """Drops one item."""
        self._items.pop(key, None)

    def clear(self) -> None:
        """Drops all items."""
        self._items.clear()
