"""Runs joint programs against their tests; see docs/sandbox.md."""
