"""Programs as rollouts: a user's function is an episode, and its calls are sampled together."""
