"""Rollouts: tasks → scored trees, and the samplers that turn prompts into completions."""
