"""A memory that forgets what has not been used for longest."""

from __future__ import annotations

from lightning_pipeline.cache import Cache


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
