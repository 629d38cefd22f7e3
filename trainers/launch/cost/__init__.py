"""What a run costs: trees, tokens, parameters and memory, counted; seconds, measured."""
