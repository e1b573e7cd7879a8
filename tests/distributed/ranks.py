"""Runs a function on several forked gloo ranks, each with a deadline."""

from __future__ import annotations

from lightning_pipeline.bench.ranks import COLLECTIVE_TIMEOUT, RankFailed, run_ranks

__all__ = ["COLLECTIVE_TIMEOUT", "RankFailed", "run_ranks"]
