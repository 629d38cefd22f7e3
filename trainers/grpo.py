"""GRPO: MAGRPO with one agent that answers for the main function alone (reward at most 2.1)."""

from __future__ import annotations

from trainers.magrpo import MAGRPOTrainer


class GRPOTrainer(MAGRPOTrainer):
    """The declared special case: one agent, so that joint actions are its completions."""
