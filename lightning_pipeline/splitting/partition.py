"""Where to cut: exactly balanced, by equal numbers of blocks, or at given names."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence

import numpy as np
from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting.balance import Balance

Allowed = Sequence[frozenset[int] | None]


def partition(
    costs: np.ndarray,
    legal: np.ndarray,
    bytes_at: np.ndarray,
    num_stages: int,
    *,
    seconds_per_byte: float,
    allowed: Allowed | None = None,
) -> list[int]:
    """Cut a sequence of pieces into stages, exactly, by dynamic programming over legal cuts.

    Minimises the largest stage, its cost plus the time of the bytes that enter and leave it (the
    last stage sends nothing on). Among these the fewest empty stages, through which bytes only
    pass, then the fewest bytes in all, then the least sum of squared stage costs.

    Args:
        costs: float [N], seconds of each piece.
        legal: bool [N + 1], whether a stage may begin before piece p; 0 and N always may.
        bytes_at: float [N + 1], bytes that cross the cut before piece p.
        num_stages: Number of stages, S.
        seconds_per_byte: Time to send one byte, in seconds.
        allowed: [N], the stages that each piece may be on; None for any.

    Returns:
        S - 1 cuts in ascending order; stage s has the pieces from cut s - 1 up to cut s.

    Raises:
        SplitError: A piece can reach none of its allowed stages.
    """
    num_pieces = len(costs)
    open_cut = np.asarray(legal, bool).copy()
    open_cut[[0, num_pieces]] = True
    if allowed is not None:
        _check_reachable(allowed, open_cut, num_stages)
    positions = np.flatnonzero(open_cut)
    crossing = np.asarray(bytes_at, float)[positions].copy()
    crossing[0] = 0.0
    ahead = np.concatenate([[0.0], np.cumsum(costs)])[positions]
    runs = np.zeros((num_stages, len(positions)), int)
    if allowed is not None:
        runs = _runs(allowed, num_stages)[:, positions]
    return [int(positions[cut]) for cut in Balance(ahead, crossing, runs, seconds_per_byte).cut()]


def _runs(allowed: Allowed, num_stages: int) -> np.ndarray:
    """int [S, N + 1]: for each stage, how many pieces before each place may not be on it."""
    kinds: dict[frozenset[int] | None, int] = {}
    kind = np.array([kinds.setdefault(stages, len(kinds)) for stages in allowed], int)
    forbidden = np.zeros((num_stages, len(kinds)), int)
    for stages, number in kinds.items():
        if stages is not None:
            forbidden[:, number] = [stage not in stages for stage in range(num_stages)]
    return np.pad(np.cumsum(forbidden[:, kind], axis=1), ((0, 0), (1, 0)))


def _check_reachable(allowed: Allowed, legal: np.ndarray, num_stages: int) -> None:
    reached = set(range(num_stages))
    for piece, stages in enumerate(allowed):
        before = reached
        # without a legal cut the piece stays with its predecessor
        later = set(range(min(before), num_stages)) if legal[piece] else before
        reached = later if stages is None else later & stages
        if not reached:
            raise SplitError(
                "",
                f"piece {piece} must be on one of the stages {sorted(stages or ())}, where its "
                f"weights are, but what runs before it ends on stage {min(before)} at the earliest",
                "Make sure that a module runs in the same order in every step, or use fewer stages",
            )


def repeated_blocks(module: nn.Module) -> list[str]:
    """Dotted names of the children of the largest ``ModuleList`` or ``Sequential`` in ``module``.

    Of equally large ones it is the outermost and first; without any the list is empty.
    """
    best: tuple[int, int, list[str]] = (1, 0, [])
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            blocks = [f"{name}.{key}" if name else key for key, _ in child.named_children()]
            depth = name.count(".") + 1 if name else 0
            if (len(blocks), -depth) > best[:2]:
                best = (len(blocks), -depth, blocks)
    return best[2]


def partition_uniform(
    piece_names: Sequence[str], legal: np.ndarray, num_stages: int, blocks: Sequence[str]
) -> list[int]:
    """Give each stage an equal number of repeated blocks, the surplus to the later stages.

    What runs before the first block goes to the first stage, what runs after the last to the last.
    Without blocks each stage gets an equal number of pieces. A cut that is not legal moves to the
    nearest legal place before it.

    Args:
        piece_names: [N], dotted names of the pieces' modules.
        legal: bool [N + 1], whether a stage may begin before piece p.
        num_stages: Number of stages.
        blocks: Dotted names of the blocks, as from `repeated_blocks`.
    """
    starts: dict[str, int] = {}
    for piece, name in enumerate(piece_names):
        for block in blocks:
            if _is_below(name, block):
                starts.setdefault(block, piece)
    begins = sorted(starts.values()) or list(range(len(piece_names)))
    cuts = []
    for stage in range(1, num_stages):
        index = stage * len(begins) // num_stages
        cut = begins[index] if index > 0 else 0
        while cut > 0 and not legal[cut]:
            cut -= 1
        cuts.append(cut)
    return cuts


def cuts_at(
    piece_names: Sequence[str],
    names: Sequence[str],
    legal: np.ndarray,
    num_stages: int | None = None,
) -> list[int]:
    """Cut before the first piece of each named module.

    Args:
        piece_names: [N], dotted names of the pieces' modules.
        names: Dotted names of the modules that begin stages 1, 2, ...
        legal: bool [N + 1], whether a stage may begin before piece p.
        num_stages: Number of stages, if it is known already.

    Raises:
        ValueError: Names are unknown, too many or few, out of order, or begin where no cut may be.
    """
    if num_stages is not None and len(names) != num_stages - 1:
        raise ValueError(
            f"partition must name {num_stages - 1} modules, one for each stage but the first, but "
            f"it names {len(names)}: {list(names)}. Change partition, or use {len(names) + 1} "
            "stages"
        )
    cuts: list[int] = []
    for name in names:
        cut = next((p for p, piece in enumerate(piece_names) if _is_below(piece, name)), None)
        if cut is None:
            raise ValueError(_unknown(name, piece_names))
        if cuts and cut <= cuts[-1]:
            before = names[len(cuts) - 1]
            raise ValueError(
                f"partition must name modules in the order in which they run, but {name!r} runs "
                f"before {before!r}, or begins with it. Swap them, or use partition='auto'"
            )
        if not legal[cut]:
            raise ValueError(_illegal(name, cut, piece_names, legal))
        cuts.append(cut)
    return cuts


def _is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _unknown(name: str, piece_names: Sequence[str]) -> str:
    known = {
        prefix
        for piece in piece_names
        for prefix in itertools.accumulate(piece.split("."), "{}.{}".format)
        if prefix
    }
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}" if close else f"known: {sorted(known)}"
    return (
        f"partition must name modules that run, but {name!r} does not run by itself (it may be "
        f"unknown, or inside a module that is kept whole); {hint}"
    )


def _illegal(name: str, cut: int, piece_names: Sequence[str], legal: np.ndarray) -> str:
    places = [p for p in range(1, len(piece_names)) if legal[p]]
    places.sort(key=lambda p: abs(p - cut))
    near = [f"{piece_names[p]!r}" for p in places[:3] if piece_names[p]]
    hint = f"A stage may begin at {' or '.join(near)}" if near else "Use partition='auto'"
    return (
        f"a stage cannot begin at {name!r}: what runs just before is written in place, or shares a "
        f"written buffer, with what runs after. {hint}"
    )
