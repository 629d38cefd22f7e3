"""The composition root: a command line goes in, an assembled run comes out and is run.

The one place that knows every room.
"""
