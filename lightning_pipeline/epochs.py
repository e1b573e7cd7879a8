"""Epochs of training that end on all ranks behind the same batch."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from lightning.pytorch import Trainer
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_pipeline.lightning_private import PrefetchDataFetcher, handle_fetcher

_UNKNOWN = -1  # length of a loader of an IterableDataset
_NONE, _LAST, _MORE = range(3)  # what a rank has got


class Ranks(Protocol):
    """All ranks of a run."""

    def least(self, number: int) -> int:
        """The smallest number that one of them gives; all of them call it."""


class _Together(PrefetchDataFetcher):
    """A fetcher that ends as soon as that of one rank does."""

    ranks: Ranks
    has_told = False
    _is_alike: bool | None = None

    @override
    def __iter__(self) -> _Together:
        self._is_alike = None
        super().__iter__()
        return self

    @override
    def __next__(self) -> Any:
        if self._is_alike is None:
            own = _promised(self)
            self._is_alike = self.ranks.least(own) == -self.ranks.least(-own) != _UNKNOWN
        if self._is_alike:
            return super().__next__()
        item = None
        try:
            item = super().__next__()
        except StopIteration:
            self.done = True
        own = _NONE if item is None else _LAST if self.done else _MORE
        all_have = self.ranks.least(own)
        self.done = all_have < _MORE
        if all_have < min(own, _MORE) and not self.has_told:
            self.has_told = True
            _tell("where the shortest loader of all ranks ends; this rank's had more")
        if all_have == _NONE:
            raise StopIteration
        return item


def end_together(trainer: Trainer) -> None:
    """Ends an epoch on all ranks when the loader of one of them ends.

    Under DDP the others wait for a replica that has no batch any more for ever. Loaders that know
    their lengths agree once an epoch, those of an IterableDataset at each batch: the length that
    it may tell need not be that of its iteration.

    Args:
        trainer: The Trainer, with its strategy set up.
    """
    ranks: Any = trainer.strategy

    def handle(fetcher: Any) -> None:
        if type(fetcher) is not PrefetchDataFetcher:
            return  # there is none, or it is known
        fetcher.__class__ = _Together
        fetcher.ranks = ranks  # type: ignore[attr-defined]
        own = _length(fetcher)
        least = ranks.least(own)
        if _UNKNOWN < least < own:
            _shorten(trainer, fetcher, least)

    handle_fetcher(trainer, handle)


def _tell(where: str) -> None:
    warnings.warn(
        f"Each epoch of training ends {where}. If they should be equally long, look for what a "
        "rank could not read.",
        stacklevel=2,
    )


def _length(fetcher: PrefetchDataFetcher) -> int:
    return _UNKNOWN if fetcher.length is None else fetcher.length


def _promised(fetcher: PrefetchDataFetcher) -> int:
    """The number of batches, where loaders keep to what they say."""
    loaders = fetcher.combined_loader.flattened
    iterable = any(isinstance(getattr(x, "dataset", x), IterableDataset) for x in loaders)
    return _UNKNOWN if iterable else _length(fetcher)


def _shorten(trainer: Trainer, fetcher: PrefetchDataFetcher, length: int) -> None:
    """Lets epochs have as many batches as the loader of another rank."""
    _tell(f"after {length} batches, as the shortest loader of all ranks has; this rank's has more")
    loader = fetcher.combined_loader
    loader.limits = [min(limit, length) for limit in loader.limits or [length]]
    trainer.fit_loop.max_batches = fetcher.length = length
    interval = trainer.val_check_interval
    if isinstance(interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(length * interval))
