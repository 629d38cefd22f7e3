"""Checks of a configuration: contradictions, keys without effect, and models that are missing."""
