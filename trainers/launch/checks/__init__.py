"""Checks of a configuration: contradictions, keys without effect, missing models."""
