"""Benchmarks that ``lightning-pipeline bench`` runs: every figure is a ratio of two things.

``harness`` lets subjects take turns, ``training`` makes a Trainer one, ``emulation`` has layers
that sleep, ``report`` writes what was found. The other modules are a benchmark each.
"""
