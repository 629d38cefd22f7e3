"""Runs tests against joint programs in isolation; docs/sandbox.md describes the levels."""
