"""Checks of a configuration: contradictions, keys without effect, and what is at hand."""
