"""Training runs: epochs and evaluation, checkpoints, the run directory and its mirror on W&B."""
