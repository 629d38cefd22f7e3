"""Scored trees go in; returns and advantages come out. Numbers alone, no model."""
