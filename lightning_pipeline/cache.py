"""A memory that forgets what has not been used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Cache(Generic[Item]):
    """Keeps the results of the last ``size`` different keys, a few versions of each.

    Ranks of one pipeline ask for the same keys in the same order, so they forget alike.

    Args:
        size: Number of keys.
        versions: Number of items of one key, of which each holds at other times.
    """

    def __init__(self, size: int, versions: int = 1) -> None:
        self._size, self._versions = size, versions
        self._items: OrderedDict[Hashable, list[Item]] = OrderedDict()

    def get(
        self,
        key: Hashable,
        make: Callable[[], Item],
        holds: Callable[[Item], bool] = lambda item: True,
    ) -> Item:
        """The item of ``key`` that holds now, made if there is none.

        Args:
            key: The key.
            make: Makes an item that holds now.
            holds: Whether an item does; the last one used is asked first.
        """
        items = self._items.get(key, [])
        found = next((n for n in reversed(range(len(items))) if holds(items[n])), None)
        item = make() if found is None else items.pop(found)
        self._items[key] = [*items, item][-self._versions :]
        self._items.move_to_end(key)
        if len(self._items) > self._size:
            self._items.popitem(last=False)
        return item

    def forget(self, key: Hashable) -> None:
        """Drops all items of a key."""
        self._items.pop(key, None)

    def clear(self) -> None:
        """Drops all items."""
        self._items.clear()
