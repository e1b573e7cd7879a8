"""Models and data of the configurations: ordinary Lightning code that knows of no pipeline."""
