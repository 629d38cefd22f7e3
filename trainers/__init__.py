"""The algorithms, one a file: a team, a rollout and a loop go in, a trained team comes out.

A trainer says when things happen; its docstring is its objective. ``comlrl/config/algorithms.py``
has the sections.
"""
