"""Agents' code read without being run: its parts, its names, and what main does with helpers."""
