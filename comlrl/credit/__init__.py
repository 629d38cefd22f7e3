"""Scored trees go in; returns, advantages and numbered chains come out. Numbers alone, no model."""
