"""The cost of a run: trees, tokens, parameters and memory, counted; seconds, measured."""
