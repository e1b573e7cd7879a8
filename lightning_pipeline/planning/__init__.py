"""Predicting a training before it runs: the fastest way that fits the devices."""
