"""Words of the command line as Hydra takes them."""

from __future__ import annotations

import re

from lightning_pipeline.schedules import AUTO, get_schedule, is_file


def for_training(word: str) -> str:
    """An override with the names of the configuration's files.

    A schedule's own file is none of these, so its name is set in the one that is there.

    Example:
        >>> for_training("schedule=Interleaved1F1B,gpipe")
        'schedule=interleaved_1f1b,gpipe'

    Args:
        word: The user's word; ``schedule=orders.csv`` becomes ``schedule.name='orders.csv'``.

    Raises:
        ValueError: If there is no such schedule, or its file can't be run.
    """
    key, equals, value = word.partition("=")
    if key != "schedule" or not equals:
        return word
    names = [name if name == AUTO else get_schedule(name).snake for name in value.split(",")]
    if any(map(is_file, names)):
        return f"schedule.name={','.join(map(_quoted, names))}"
    return f"schedule={','.join(names)}"


def for_target(word: str) -> str:
    """An override of a benchmark or a picture.

    To Hydra ``schedule=`` is a choice among the files of ``conf/schedule``, of which there is one.

    Args:
        word: The user's word; ``schedule=1f1b`` becomes ``schedules=1f1b``.
    """
    value = re.fullmatch("schedules?=(.*)", word, re.DOTALL)
    if value is None:
        return word
    return f"schedules={_quoted(value[1]) if is_file(value[1]) else value[1]}"


def _quoted(text: str) -> str:
    """A value of Hydra's, which would take blanks and brackets of a path for its own."""
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"
