"""The coefficient of PPO's KL to the reference."""

from __future__ import annotations

import torch

from comlrl.config.algorithms import PPOConfig


class KLCoefficient:
    """The coefficient of the KL to the reference: fixed, or adapted so that the KL approaches
    ``kl_target`` (Ziegler 2019)."""

    def __init__(self, section: PPOConfig) -> None:
        self.section, self.value = section, section.kl_coef

    def adapt(self, kl: float, joint_actions: int) -> None:
        """Update kl_coef ← kl_coef · (1 + clip(KL / target − 1, ±0.2) · min(n / horizon, 1))."""
        assert self.section.kl_target is not None
        error = max(-0.2, min(0.2, kl / self.section.kl_target - 1))
        self.value *= 1 + error * min(joint_actions / self.section.kl_horizon, 1)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"value": torch.tensor(self.value, dtype=torch.float64)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.value = float(tensors["value"])
