"""Partitions: exact against brute force, feasible on placed models, and fast."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting import cuts_at, partition, partition_uniform, repeated_blocks

SECONDS_PER_BYTE = 0.01
Allowed = list[frozenset[int] | None]


def price(
    cuts: tuple[int, ...], costs: np.ndarray, bytes_at: np.ndarray
) -> tuple[float, int, float, float]:
    """Largest stage, empty stages, bytes in all, unevenness: what is minimised, in this order."""
    bounds = [0, *cuts, len(costs)]
    crossing = [0.0, *(bytes_at[cut] if cut else 0.0 for cut in cuts), 0.0]
    work = [costs[low:high].sum() for low, high in itertools.pairwise(bounds)]
    loads = [
        seconds + SECONDS_PER_BYTE * (before + after)
        for seconds, (before, after) in zip(work, itertools.pairwise(crossing), strict=True)
    ]
    empty = sum(low == high for low, high in itertools.pairwise(bounds))
    return max(loads), empty, sum(crossing), sum(seconds**2 for seconds in work)


def is_allowed(cuts: tuple[int, ...], allowed: Allowed) -> bool:
    stage_of = [sum(cut <= piece for cut in cuts) for piece in range(len(allowed))]
    return all(
        stages is None or stage in stages for stage, stages in zip(stage_of, allowed, strict=True)
    )


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_partition_is_exact(seed: int, placed: bool) -> None:
    rng = np.random.default_rng(seed)
    num_pieces, num_stages = int(rng.integers(0, 8)), int(rng.integers(1, 5))
    costs = rng.integers(0, 5, num_pieces).astype(float)
    legal = rng.random(num_pieces + 1) > 0.2
    legal[[0, -1]] = True
    bytes_at = rng.integers(0, 60, num_pieces + 1).astype(float)
    bytes_at[0] = 0.0
    allowed: Allowed = [
        frozenset(int(s) for s in np.flatnonzero(rng.random(num_stages) > 0.3))
        if placed and rng.random() > 0.4
        else None
        for _ in range(num_pieces)
    ]
    places = [p for p in range(num_pieces + 1) if legal[p]]
    candidates = [
        cuts
        for cuts in itertools.combinations_with_replacement(places, num_stages - 1)
        if is_allowed(cuts, allowed)
    ]
    arguments = (costs, legal, bytes_at, num_stages)
    options = {"seconds_per_byte": SECONDS_PER_BYTE, "allowed": allowed if placed else None}
    if not candidates:
        with pytest.raises(SplitError, match="piece"):
            partition(*arguments, **options)
        return
    cuts = tuple(partition(*arguments, **options))
    assert cuts in candidates
    best = min(price(other, costs, bytes_at) for other in candidates)
    assert price(cuts, costs, bytes_at) == pytest.approx(best)


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([4, 1, 1, 2], 2, [1]),
        ([1, 1], 4, [0, 0, 1]),
        ([], 3, [0, 0]),
        ([5], 1, []),
    ],
)
def test_partition_of_small_sequences(
    costs: list[float], num_stages: int, expected: list[int]
) -> None:
    num_cuts = len(costs) + 1
    bytes_at = np.ones(num_cuts)
    cuts = partition(
        np.array(costs, float), np.ones(num_cuts, bool), bytes_at, num_stages, seconds_per_byte=0.0
    )
    assert cuts == expected


def test_partition_names_the_piece_that_cannot_be_placed() -> None:
    allowed: Allowed = [None, frozenset({1}), None, frozenset({0})]
    with pytest.raises(SplitError, match=r"piece 3 must be on one of the stages \[0\]"):
        partition(
            np.ones(4), np.ones(5, bool), np.zeros(5), 2, seconds_per_byte=0.0, allowed=allowed
        )


def best_price(
    costs: np.ndarray, legal: np.ndarray, bytes_at: np.ndarray, num_stages: int
) -> tuple[float, int, float, float]:
    """What `price` says of the best cut, from tables over all pairs of places."""
    places = [int(place) for place in np.flatnonzero(legal)]
    crossing, ahead = [0.0, *bytes_at[1:]], np.r_[0.0, np.cumsum(costs)]

    def load(i: int, j: int, stage: int) -> float:
        leaves = crossing[j] if stage < num_stages - 1 else 0.0
        return float(ahead[j] - ahead[i] + SECONDS_PER_BYTE * (crossing[i] + leaves))

    largest = {0: 0.0}
    for stage in range(num_stages):
        largest = {
            j: min(max(largest[i], load(i, j, stage)) for i in places if i <= j and i in largest)
            for j in places
        }
    best = {0: (0, 0.0, 0.0)}
    for stage in range(num_stages):
        ways: dict[int, list[tuple[int, float, float]]] = {}
        for i, (empty, nbytes, squares) in best.items():
            for j in places:
                if i <= j and load(i, j, stage) <= largest[len(costs)] * (1 + 1e-9):
                    unevenness = squares + float(ahead[j] - ahead[i]) ** 2
                    received = nbytes + (crossing[i] if stage else 0.0)
                    ways.setdefault(j, []).append((empty + (i == j), received, unevenness))
        best = {j: min(found) for j, found in ways.items()}
    return largest[len(costs)], *best[len(costs)]


@pytest.mark.parametrize("heavy", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(10))
def test_long_sequences_are_cut_exactly(seed: int, heavy: float) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_stages = int(rng.integers(8, 16)), int(rng.integers(3, 12))
    costs = np.tile(rng.random(4), num_layers) if seed % 2 else rng.random(4 * num_layers)
    costs[-1 if seed % 4 < 2 else 0] += heavy * costs.sum()
    legal = rng.random(len(costs) + 1) > 0.1
    legal[[0, -1]] = True
    bytes_at = np.r_[np.tile(rng.integers(0, 20, 4), num_layers), 9].astype(float)
    arguments = costs, legal, bytes_at, num_stages
    cuts = partition(*arguments, seconds_per_byte=SECONDS_PER_BYTE)
    assert all(legal[cut] for cut in cuts)
    assert price(tuple(cuts), costs, bytes_at) == pytest.approx(best_price(*arguments))


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("heavy", [0.0, 0.1, 0.5])
def test_partition_grows_with_pieces_and_not_their_square(heavy: float, placed: bool) -> None:
    """Twenty thousand pieces: tables of all pairs would be 400 million numbers each."""
    num_pieces, num_stages = 20_000, 64
    rng = np.random.default_rng(0)
    costs = np.tile(rng.random(5), num_pieces // 5)
    costs[-1] += heavy * costs.sum()
    bytes_at = np.r_[np.tile([8.0, 8, 16, 16, 24], num_pieces // 5), 8]
    stage_of = np.arange(num_pieces) * num_stages // num_pieces
    allowed = [None if p % 5 > 2 else frozenset({int(s)}) for p, s in enumerate(stage_of)]
    legal = np.ones(num_pieces + 1, bool)
    start = time.thread_time()
    cuts = partition(
        costs,
        legal,
        bytes_at,
        num_stages,
        seconds_per_byte=1e-5,
        allowed=allowed if placed else None,
    )
    assert time.thread_time() - start < 10.0
    assert len(cuts) == num_stages - 1


NAMES = ["embed", "blocks.0", "blocks.1.a", "blocks.1.b", "blocks.2", "blocks.3", "", "head"]
BLOCKS = [f"blocks.{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("num_stages", "blocks", "illegal", "expected"),
    [
        (1, BLOCKS, [], []),
        (2, BLOCKS, [], [4]),
        (4, BLOCKS, [], [2, 4, 5]),
        (3, BLOCKS, [], [2, 4]),
        (2, BLOCKS, [4], [3]),
        (6, BLOCKS, [], [0, 2, 4, 4, 5]),
        (2, [], [], [4]),
    ],
)
def test_uniform_partition(
    num_stages: int, blocks: list[str], illegal: list[int], expected: list[int]
) -> None:
    legal = np.ones(len(NAMES) + 1, bool)
    legal[illegal] = False
    assert partition_uniform(NAMES, legal, num_stages, blocks) == expected


def test_repeated_blocks_are_the_children_of_the_largest_list() -> None:
    heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    blocks = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()) for _ in range(3)))
    assert repeated_blocks(nn.ModuleDict({"heads": heads, "blocks": blocks})) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    assert repeated_blocks(nn.Linear(1, 1)) == []


def test_cuts_at_names() -> None:
    legal = np.ones(len(NAMES) + 1, bool)
    assert cuts_at(NAMES, ["blocks.1", "head"], legal, 3) == [2, 7]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["blocks.1"], "must name 2 modules, one for each stage but the first, but it names 1"),
        (["blocks.1", "heat"], "'heat' does not run by itself .* did you mean 'head'"),
        (["blocks.1", "zzz"], "known: .*'blocks', 'blocks.0'"),
        (["head", "blocks.1"], "'blocks.1' runs before 'head', or begins with it. Swap them"),
        (["blocks.1", "blocks.3"], "cannot begin at 'blocks.3'.* may begin at 'blocks.2'"),
    ],
)
def test_cuts_at_refuses(names: list[str], message: str) -> None:
    legal = np.ones(len(NAMES) + 1, bool)
    legal[[5, 6]] = False
    with pytest.raises(ValueError, match=message):
        cuts_at(NAMES, names, legal, 3)
