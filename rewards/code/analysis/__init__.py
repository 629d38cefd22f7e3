"""Static analysis of agents' code: its parts, its names, and main's use of the helpers."""
