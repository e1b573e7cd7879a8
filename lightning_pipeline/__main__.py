"""`python -m lightning_pipeline` is the command `lightning-pipeline`."""

import sys

from lightning_pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
