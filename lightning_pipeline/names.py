"""Dotted names of modules, as a plan shows them and as ``partition=[...]`` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from typing import TypeAlias


def stage_modules(pieces: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names the modules of each stage, a module whose pieces are all there by its own name.

    Example:
        >>> stage_modules([["net.0.conv", "net.0.norm", "net.1.conv"], ["net.1.norm", "head"]])
        [['net.0', 'net.1.conv'], ['net.1.norm', 'head']]

    Args:
        pieces: For each stage, the dotted module name of every piece, in order. A piece that is a
            container's own code has the container's name.

    Returns:
        The names, marked where a stage runs nothing but own code of a module.
    """
    stages_of: dict[str, set[int]] = {}
    for stage, names in enumerate(pieces):
        for name in names:
            for prefix in _prefixes(name):
                stages_of.setdefault(prefix, set()).add(stage)
    divided = _divided(name for names in pieces for name in names)
    named = []
    for names in pieces:
        shown: dict[str, None] = {}
        for name in names:
            whole = (prefix for prefix in _prefixes(name) if len(stages_of[prefix]) == 1)
            shown[next(whole, name)] = None
        inner = _divided(shown)
        outer = [name for name in shown if name and name not in inner]
        named.append(
            [
                _own_code(name) if len(stages_of[name]) > 1 and name in divided else name
                for name in outer or shown
            ]
        )
    return named


# Parts of dotted names; the part "" says that a name ends there.
_Tree: TypeAlias = "dict[str, _Tree]"


def condense_names(names: Sequence[str]) -> str:
    """Writes dotted names readably: numbered neighbours become ranges.

    Example:
        >>> condense_names(["net.stem", "net.blocks.0", "net.blocks.1", "net.norm"])
        'net.stem, net.blocks.0-1, net.norm'
        >>> condense_names(["net.0.conv", "net.0.norm", "net.1.conv", "net.1.norm"])
        'net.0-1.{conv, norm}'

    Args:
        names: Dotted names; ``""`` is the outermost module itself.
    """
    tree: _Tree = {}
    for name in names:
        node = tree
        for part in (name or "(whole module)").split("."):
            node = node.setdefault(part, {})
        node[""] = {}
    return ", ".join(_paths(tree)) if names else "-"


def _paths(tree: _Tree) -> list[str]:
    """The condensed names below one node."""
    paths: list[str] = []
    for first, last, below in _runs(tree):
        label = first if first == last else f"{first}-{last}"
        tails = [tail for tail in _paths(below) if tail]
        if "" in below or not below:
            paths.append(label)
        if len(tails) > 1 and first.isdigit():
            paths.append(f"{label}.{{{', '.join(tails)}}}")
        else:
            paths += [f"{label}.{tail}" for tail in tails]
    return paths


def _runs(tree: _Tree) -> Iterator[tuple[str, str, _Tree]]:
    """First and last part of each run of consecutive numbers that have the same names below."""
    run: tuple[str, str, _Tree] | None = None
    for part, below in tree.items():
        if run is not None:
            first, last, same = run
            if last.isdigit() and part == str(int(last) + 1) and below == same:
                run = (first, part, same)
                continue
            yield run
        run = (part, part, below)
    if run is not None:
        yield run


def partition_names(pieces: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Names by which ``partition=[...]`` makes this cut, the outermost there are.

    Example:
        >>> partition_names([["stem", "net.0.conv"], ["net.1.conv", "net.1", "head"]])
        ('net.1',)

    Args:
        pieces: For each stage, the dotted module name of every piece, in order.

    Returns:
        The module that begins each stage after the first; ``None`` if a stage is empty, or begins
        with a module's own code or with another call of a module.
    """
    if not all(pieces):
        return None
    names = []
    before = {prefix for name in pieces[0] for prefix in _prefixes(name)}
    for stage in pieces[1:]:
        prefixes = _prefixes(stage[0]) if stage[0] else ()
        name = next((n for n in prefixes if n not in before), None)
        if name is None:
            return None
        names.append(name)
        before.update(prefix for name in stage for prefix in _prefixes(name))
    return tuple(names)


def cut_places(pieces: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """What runs just before and behind each cut; dots stand for own code of the module around.

    Example:
        >>> cut_places([["net.0.qkv"], ["net.0", "net.0.out"]])
        ('net.0.qkv | ... net.0.out',)

    Args:
        pieces: For each stage, the dotted module name of every piece, in order.
    """
    order = [name for stage in pieces for name in stage]
    own = _divided(order)
    before, behind = _nearest(order, own), _nearest(order[::-1], own)[::-1]
    places = []
    for cut in accumulate(len(stage) for stage in pieces[:-1]):
        left = [*before[cut], *(["..."] if cut and order[cut - 1] in own else [])]
        right = [*(["..."] if cut < len(order) and order[cut] in own else []), *behind[cut]]
        places.append(" ".join([*left, "|", *right]))
    return tuple(places)


def _nearest(order: Sequence[str], own: set[str]) -> list[list[str]]:
    """Before each place in an order, the last name that is not in ``own``, if there is one."""
    nearest: list[list[str]] = [[]]
    for name in order:
        nearest.append(nearest[-1] if name in own else [name])
    return nearest


def common_prefix(names: Sequence[str]) -> str:
    """The module that all ``names`` are inside of; ``""`` if there is none.

    Example:
        >>> common_prefix(["model.base.wte", "model.base.h.0", "model.base.h.1"])
        'model.base'
        >>> common_prefix(["net.blocks.0", "net.blocks.1"])  # numbers alone would say nothing
        'net'

    Args:
        names: Dotted names.
    """
    parents = [name.split(".")[:-1] for name in names]
    levels = zip(*parents, strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    while shared and any(name.split(".")[len(shared)][:1].isdigit() for name in names):
        shared.pop()
    return ".".join(shared)


def _prefixes(name: str) -> Iterator[str]:
    """The modules around a module, outermost first, and the module."""
    return accumulate(name.split("."), "{}.{}".format)


def _divided(names: Iterable[str]) -> set[str]:
    """The modules, the outermost ``""`` among them, that others of ``names`` are inside of."""
    return {around for name in names if name for around in ("", *[*_prefixes(name)][:-1])}


def _own_code(name: str) -> str:
    """The name of a piece that is the own code of a module with other pieces."""
    return f"{name} (own code)".strip()
