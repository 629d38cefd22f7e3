"""What a configuration cannot mean, what of it has no effect, and what is at hand."""
