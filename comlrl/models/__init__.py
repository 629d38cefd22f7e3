"""Names of models go in, agents come out; token rows through an agent give log-probabilities,
hidden states and values."""
