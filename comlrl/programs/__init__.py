"""Rollouts of user programs: an episode is one call of a user's function or command."""
