"""Loads tasks from data sets, and composes agents' prompts at turn 1 and later."""
