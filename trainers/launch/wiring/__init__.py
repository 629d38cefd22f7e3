"""Building a run from its configuration: work, models, samplers, weights and loop."""
