"""Counts and numbers as texts say them."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MANY = 8  # numbers are listed one by one up to here


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "stage"), plural(2, "microbatch", "es")
        ('1 stage', '2 microbatches')

    Args:
        count: How many.
        noun: The word for one.
        ending: What makes it the word for several.
    """
    return f"{count} {noun}" + ("" if count == 1 else ending)


def one_of(counts: Sequence[int], noun: str, ending: str = "s") -> str:
    """Counts to choose from, with their noun.

    Example:
        >>> one_of([4, 8], "rank")
        '4 or 8 ranks'

    Args:
        counts: At least one.
        noun: The word for one.
        ending: What makes it the word for several.
    """
    *others, last = counts
    return "".join(f"{count} or " for count in others) + plural(last, noun, ending)


def plain(value: float, digits: int) -> str:
    """A positive number in so many digits, without an exponent.

    Example:
        >>> plain(12344.0, 4), plain(9.87654, 3)
        ('12,340', '9.88')

    Args:
        value: The number.
        digits: Digits that are not rounded away; whole thousands have commas.
    """
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    # The exponent is that of the rounded value: 999.96 has four digits in 1,000.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = digits - 1 - exponent
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def listed(numbers: Sequence[int]) -> str:
    """Rising numbers, and where there are many, runs of them by their ends.

    Example:
        >>> listed([2, 3]), listed(range(1000))
        ('2, 3', '0-999')

    Args:
        numbers: The numbers.
    """
    if len(numbers) <= _MANY:
        return ", ".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
