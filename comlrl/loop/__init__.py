"""Tasks and a trainer go in; training steps come out, and around them all that a run leaves.

Evaluations at their cadence, checkpoints, the run directory and the summary; signals are heeded
between steps.
"""
