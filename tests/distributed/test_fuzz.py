"""Random configurations: as on one device, or refused before they begin.

``make test-fuzz DRAWS=500`` runs draws that no one has seen, with seeds that the ids show, and
``make test-fuzz SEED=123 DRAWS=1`` the draw of one id again.
"""

from __future__ import annotations

import os

import pytest

from tests.distributed.draws import draw_from
from tests.distributed.trials import examine, simplify

FEW = range(40)
REFUSED = {15, 17, 26, 29}
"""Of the few; all others are as on one device.

What a seed draws is up to hypothesis's generator: if other seeds are refused after its version or a
strategy of the draws has moved, look at what they draw now before it is taken for a regression of
the product. An outcome other than equal or refused is one whatever the version.
"""
FIRST, COUNT = int(os.environ.get("SEED", "0")), int(os.environ.get("DRAWS", "0"))


def check(seed: int) -> str:
    draw = draw_from(seed)
    outcome = examine(draw)
    if not outcome.is_right:
        pytest.fail(
            f"{outcome.kind}: {outcome.text}\n{draw}\nmore simply {simplify(draw, outcome)}\n"
            f"again by: make test-fuzz SEED={seed} DRAWS=1",
            pytrace=False,
        )
    return outcome.kind


@pytest.mark.parametrize("seed", FEW)
def test_few_draws(seed: int) -> None:
    assert check(seed) == ("refused" if seed in REFUSED else "equal")


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_draws(seed: int) -> None:
    check(seed)
