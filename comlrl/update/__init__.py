"""Turns token rows with credit into losses, gradients and optimizer steps."""
