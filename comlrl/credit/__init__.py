"""Computes returns, advantages and chains of decisions from scored rollouts, without a model."""
