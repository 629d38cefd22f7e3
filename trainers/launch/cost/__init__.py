"""The cost of a run: computed trees, tokens, parameters and memory, and measured seconds."""
