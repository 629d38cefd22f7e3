"""The training loop and everything around its steps: evaluations, checkpoints, the run directory,
logs and the summary, and the handling of signals between steps."""
