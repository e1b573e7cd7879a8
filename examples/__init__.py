"""Models and data that the configurations train: ordinary Lightning code, with nothing of a pipeline in it."""
