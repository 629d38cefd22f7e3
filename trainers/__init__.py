"""The algorithms, one per file. Each trains a team, given a rollout and a loop.

A trainer only orders the steps of its algorithm; its module docstring states the objective. The
configuration sections are in ``comlrl/config/algorithms.py``.
"""
