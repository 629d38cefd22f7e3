"""The composition root: assembles a run from the command line and executes it.

Only this package imports all others.
"""
