"""Configuration in, a run out: work, models, samplers, weights and loop."""
