"""Epochs, of training and of evaluation, that end on all ranks behind the same batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.lightning_private import (
    PrefetchDataFetcher,
    handle_evaluation,
    handle_fetcher,
    replace_evaluation_steps,
)

_UNKNOWN = -1  # length of a loader of an IterableDataset
_EPOCH_METHODS = ("advance", "on_advance_end")
_FIT_METHODS = ("on_advance_start", "advance", "on_advance_end")
_NONE = 0  # what a rank has got where its loaders have ended; see _Together._word


class Ranks(Protocol):
    """All ranks of a run, or with ``alone`` those of one pipeline; all of them call a method."""

    global_rank: int

    def extent(self, number: int, alone: bool = False) -> tuple[int, int]:
        """The smallest and the largest number that one of them gives."""

    def gather(self, value: Any, alone: bool = False) -> dict[int, Any]:
        """What each of them gives, by its number."""

    def end_at(self, batch: int, alone: bool = False) -> bool:
        """Whether all of them end an epoch early and behind the same batch."""


class _Epochs:
    """The epochs of one loop.

    Args:
        stage: What it does, for messages.
        ranks: The ranks.
        alone: Whether each pipeline ends for itself, as evaluations of replicas do under DDP.
    """

    def __init__(self, stage: str, ranks: Ranks, alone: bool) -> None:
        self._stage, self._ranks, self.alone = stage, ranks, alone
        self._limits: list[Any] | None = None
        self._told: set[str] = set()

    def tell(self, where: str) -> None:
        """Warns once that an epoch ends before this rank's loader does."""
        if where not in self._told:
            self._told.add(where)
            _tell(f"Each epoch of {self._stage} ends {where}.")

    def agree(self, limits: list[Any], length: int = _UNKNOWN) -> tuple[list[Any], int]:
        """The fewest batches of each loader on all ranks, and the smallest length.

        Raises:
            PipelineError: On all ranks, if they have other numbers of loaders, or only some of a
                pipeline have a batch.
        """
        gathered = self._ranks.gather((limits, length), self.alone)
        _require_loaders(self._stage, {rank: len(found) for rank, (found, _) in gathered.items()})
        totals = {rank: sum(found) for rank, (found, _) in gathered.items()}
        if self.alone and 0 < sum(map(bool, totals.values())) < len(totals):
            raise PipelineError(
                f"The loaders for {self._stage} must have batches on all ranks of a pipeline, or "
                f"on none, but have on {_listed(totals)}. Look for what a rank could not read."
            )
        columns = zip(*(found for found, _ in gathered.values()), strict=True)
        return [min(column) for column in columns], min(each for _, each in gathered.values())

    def shorten(self, limits: list[Any]) -> None:
        """Lets new loaders have as many batches as those of the rank that has the fewest."""
        if limits is self._limits:
            return
        self._limits, own = limits, list(limits)
        limits[:], _ = self.agree(own)
        if any(least < mine < float("inf") for least, mine in zip(limits, own, strict=True)):
            numbers = " and ".join(map(str, limits))
            self.tell(f"after {numbers} batches, as the shortest loader has; this rank's has more")

    def join(self, fetcher: Any) -> bool:
        """Lets a fetcher end with those of the others; whether it is a new one."""
        if type(fetcher) is not PrefetchDataFetcher:
            return False  # there is none, or it is known
        fetcher.__class__ = _Together
        fetcher.ranks, fetcher.epochs = self._ranks, self  # type: ignore[attr-defined]
        return True

    def require_end(self, batch: int, promised: Any, error: StopIteration) -> None:
        """Finds out whether the others end the epoch here too, where this rank does so early.

        Raises:
            PipelineError: If not all of them do.
        """
        if self._ranks.end_at(batch, self.alone):
            return
        breaks = batch < promised < float("inf")
        promise = f" of the {promised} that its loaders promise" if breaks else ""
        raise PipelineError(
            f"Rank {self._ranks.global_rank} ended an epoch of {self._stage} behind batch {batch}"
            f"{promise}, and other ranks did not, but all ranks must end an epoch at the same "
            "batch. Let __len__ of the loader or its batch_sampler tell how many batches come. "
            "Raise no StopIteration in hooks, as next(iterator) does and next(iterator, None) does "
            "not. Return -1 from on_train_batch_start on all ranks or on none."
        ) from error


class _Together(PrefetchDataFetcher):
    """A fetcher that ends as soon as that of one rank does."""

    ranks: Ranks
    epochs: _Epochs
    _is_alike: bool | None = None
    _is_over = False

    @override
    def __iter__(self) -> _Together:
        self._is_alike, self._is_over = None, False
        super().__iter__()
        return self

    @override
    def __next__(self) -> Any:
        if self._is_alike is None:
            least, most = self.ranks.extent(_promised(self), self.epochs.alone)
            self._is_alike = least == most != _UNKNOWN
        item = self._promised_item() if self._is_alike else self._common_item()
        if item is None:
            raise StopIteration
        return item

    def _promised_item(self) -> Any:
        try:
            return super().__next__()
        except StopIteration as error:
            if self.epochs.alone and self.length is not None and self.fetched < self.length:
                self.epochs.require_end(self.fetched, self.length, error)
            raise

    def _common_item(self) -> Any:
        """The next one that all ranks have; ``None`` if one has no more."""
        item = None if self._is_over else self._own_item()
        least = self._word(item)
        while not self._is_over:
            own = self._word(item)
            least, most = self.ranks.extent(own, self.epochs.alone)
            if least < own and (least % 2 or _loaders(least) < _loaders(own)):
                self.epochs.tell(
                    "where the shortest loader of all ranks ends; this rank's had more"
                )
            if least == _NONE or _loaders(least) == _loaders(most):
                break
            while _loaders(self._word(item)) > _loaders(least):
                item = self._own_item()
        self._is_over = self.done = least == _NONE or least % 2 == 1
        return None if least == _NONE else item

    def _own_item(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.done = True
            return None

    def _word(self, item: Any) -> int:
        """How far this rank is: twice the loaders that are left, less one with the last item."""
        if item is None:
            return _NONE
        left = len(self.combined_loader.flattened) - item[2]  # of which item is the first's
        return 2 * left - bool(self.done)


def end_together(trainer: Trainer) -> None:
    """Ends an epoch on all ranks when the loader of one of them ends.

    Under DDP the others wait for a replica that has no batch any more for ever. Loaders that know
    their lengths agree once an epoch, those of an IterableDataset at each batch: the length that
    it may tell need not be that of its iteration. Where any other loader ends before what it has
    promised, or a hook ends the epoch by a StopIteration, the ranks ask each other whether all do.

    Args:
        trainer: The Trainer, with its strategy set up.

    Raises:
        PipelineError: If only some ranks have a loader to validate with while they train.
    """
    ranks: Any = trainer.strategy
    loops = [
        ("validation", trainer.fit_loop.epoch_loop.val_loop),
        ("validation", trainer.validate_loop),
        ("testing", trainer.test_loop),
        ("prediction", trainer.predict_loop),
    ]
    for stage, loop in loops:
        epochs = _Epochs(stage, ranks, alone=True)
        handle_evaluation(loop, epochs)
        replace_evaluation_steps(loop, partial(_without_end, stage))
    if trainer.state.fn == TrainerFn.FITTING:
        _require_loaders("validation", ranks.gather(int(trainer.enable_validation)))
        _train_together(trainer, _Epochs("training", ranks, alone=False))


def _train_together(trainer: Trainer, epochs: _Epochs) -> None:
    def handle(fetcher: Any) -> None:
        if not epochs.join(fetcher):
            return
        own = _length(fetcher)
        _, least = epochs.agree(list(fetcher.combined_loader.limits), own)
        if _UNKNOWN < least < own:
            epochs.tell(f"after {least} batches, as the shortest loader has; this rank's has more")
            _shorten(trainer, fetcher, least)

    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    handle_fetcher(fit_loop, handle)

    def checked(method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            try:
                method(*args)
            except StopIteration as error:  # which Lightning takes for the end of the epoch
                batch = loop.batch_progress.current.ready
                epochs.require_end(batch, trainer.num_training_batches, error)
                raise

        return run

    for owner, names in ((loop, _EPOCH_METHODS), (fit_loop, _FIT_METHODS)):
        for name in names:
            owner.__dict__[name] = checked(getattr(type(owner), name).__get__(owner))


def _without_end(stage: str, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        try:
            return evaluate(*args)
        except StopIteration as error:  # which Lightning takes for the end of the loader
            raise RuntimeError(f"a hook of {stage} raised StopIteration") from error

    return run


def _require_loaders(stage: str, counts: dict[int, int]) -> None:
    if len(set(counts.values())) > 1:
        raise PipelineError(
            f"All ranks must have the same number of loaders for {stage}, but have "
            f"{_listed(counts)}. Give the Trainer the same loaders on every rank."
        )


def _listed(counts: dict[int, Any]) -> str:
    return ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))


def _tell(text: str) -> None:
    warnings.warn(
        f"{text} If they should be equally long, look for what a rank could not read.",
        stacklevel=2,
    )


def _loaders(word: int) -> int:
    """How many loaders are left where :meth:`_Together._word` is ``word``."""
    return (word + 1) // 2


def _length(fetcher: PrefetchDataFetcher) -> int:
    return _UNKNOWN if fetcher.length is None else fetcher.length


def _promised(fetcher: PrefetchDataFetcher) -> int:
    """The number of batches, where loaders keep to what they say."""
    loaders = fetcher.combined_loader.flattened
    iterable = any(isinstance(getattr(x, "dataset", x), IterableDataset) for x in loaders)
    return _UNKNOWN if iterable else _length(fetcher)


def _shorten(trainer: Trainer, fetcher: PrefetchDataFetcher, length: int) -> None:
    """Lets epochs have as many batches as the loader of another rank."""
    loader = fetcher.combined_loader
    loader.limits = [min(limit, length) for limit in loader.limits or [length]]
    trainer.fit_loop.max_batches = fetcher.length = length
    interval = trainer.val_check_interval
    if isinstance(interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(length * interval))
