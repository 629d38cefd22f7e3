"""Agents and their models: loading, log-probabilities, hidden states and values."""
