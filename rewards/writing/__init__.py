"""The writing domain: summaries of one post, each longer than the one before and adding to it."""
