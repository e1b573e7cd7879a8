"""Hydra configurations: `train.yaml` and one folder for each group, shipped inside the package."""
