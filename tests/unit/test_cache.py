"""A memory that forgets what has not been used for longest."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from lightning_pipeline import plans as plans_module
from lightning_pipeline.cache import Cache
from lightning_pipeline.plans import Plans


def test_the_longest_unused_is_forgotten():
    cache, made = Cache(2), []

    def get(key):
        return cache.get(key, lambda: made.append(key) or key)

    assert [get(key) for key in "abacb"] == list("abacb")
    assert made == ["a", "b", "c", "b"]
    cache.forget("c")
    cache.forget("unknown")
    get("c")
    assert made[-1] == "c"
    cache.clear()
    get("c")
    assert made[-2:] == ["c", "c"]


def test_versions_of_a_key_hold_at_different_times():
    cache, made, now = Cache(2, versions=2), [], 1

    def get(key="a"):
        return cache.get(key, lambda: made.append(now) or now, lambda item: item == now)

    for now in (1, 2, 1, 2, 2):
        assert get() == now
    assert made == [1, 2]
    now = 3
    assert get() == 3  # 1 is forgotten, for it was used last the longest ago
    now = 2
    assert get() == 2 and made == [1, 2, 3]
    now = 1
    assert get() == 1 and made[-1] == 1


def test_shapes_that_do_not_come_again_are_forgotten():
    """Also how often they were planned anew, for a run whose shapes never repeat."""
    plans = Plans(LightningModule())
    for shape in range(3 * plans_module._CACHED):
        plans.look()
        plans.get("training_step", shape, object)
    assert len(plans._in_a_row) == plans_module._CACHED
