"""What a run costs: trees, tokens, parameters, memory and seconds, each counted once."""
