"""Rewards: they score joint actions. Model-written code runs only in the sandbox."""
