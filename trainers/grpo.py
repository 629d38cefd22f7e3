"""GRPO: MAGRPO with one agent that answers for the main function alone (reward at most 2.1)."""

from __future__ import annotations

from trainers.configs import GRPOConfig
from trainers.magrpo import MAGRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]


class GRPOTrainer(MAGRPOTrainer):
    """The declared special case: one agent, so that joint actions are its completions."""
