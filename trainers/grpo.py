"""GRPO: MAGRPO with one agent that does all the work alone."""

from __future__ import annotations

from comlrl.trainers.magrpo import MAGRPOTrainer


class GRPOTrainer(MAGRPOTrainer):
    """MAGRPO for a single agent, whose completions are the joint actions."""
