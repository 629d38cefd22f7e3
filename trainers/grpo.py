"""GRPO: MAGRPO with one agent that does all the work alone."""

from __future__ import annotations

from comlrl.trainers.magrpo import MAGRPOTrainer


class GRPOTrainer(MAGRPOTrainer):
    """The declared special case: one agent, so that joint actions are its completions."""
