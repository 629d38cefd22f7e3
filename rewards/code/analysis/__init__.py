"""What the agents' code says without being run: its parts, names, and what main does with helpers."""
