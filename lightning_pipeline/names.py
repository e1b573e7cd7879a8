"""Dotted names of modules, as a plan shows them and as ``partition=[...]`` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
            for prefix in accumulate(name.split("."), "{}.{}".format):
                stages_of.setdefault(prefix, set()).add(stage)
    named = []
    for names in pieces:
        shown: dict[str, None] = {}
        for name in names:
            prefixes = accumulate(name.split("."), "{}.{}".format)
            whole = (prefix for prefix in prefixes if len(stages_of[prefix]) == 1)
            shown[next(whole, name)] = None
        inner = {name for name in shown if any(other.startswith(name + ".") for other in shown)}
        outer = [name for name in shown if name and name not in inner]
        named.append(
            [_marked(name, pieces) if len(stages_of[name]) > 1 else name for name in outer or shown]
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
    before, names = list(pieces[0]), []
    for stage in pieces[1:]:
        prefixes = accumulate(stage[0].split("."), "{}.{}".format) if stage[0] else ()
        name = next((n for n in prefixes if not any(_is_below(b, n) for b in before)), None)
        if name is None:
            return None
        names.append(name)
        before += stage
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
    own = {name for name in set(order) if _marked(name, pieces) != name}
    places = []
    for cut in accumulate(len(stage) for stage in pieces[:-1]):
        before, behind = ([n for n in part if n not in own] for part in (order[:cut], order[cut:]))
        left = [*before[-1:], *(["..."] if cut and order[cut - 1] in own else [])]
        right = [*(["..."] if cut < len(order) and order[cut] in own else []), *behind[:1]]
        places.append(" ".join([*left, "|", *right]))
    return tuple(places)


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


def _marked(name: str, pieces: Sequence[Sequence[str]]) -> str:
    """The name of a piece, and that it is a module's own code if the module has other pieces."""
    others = any(_is_below(other, name) and other != name for names in pieces for other in names)
    return f"{name} (own code)".strip() if others else name


def _is_below(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")
