"""Stores the team whose candidates had the best rewards; restores it if a later one is worse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, variance

import torch

from comlrl.loop.checkpoint import load_part, tensors_of
from comlrl.loop.parts import Part
from comlrl.preferences.pairs import Round

ERRORS = 3.0  # standard errors of a difference below which it counts as noise between tasks
FEWEST = 6  # least number of tasks from which a standard error is estimated


class BestRound:
    """Weights and optimizer states at the start of the round with the best mean reward.

    A part of checkpoints; tensors are on the CPU.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Set up the store. ``parts``: the parts to restore, by name."""
        self.parts = parts
        self.mean, self.error = -math.inf, 0.0  # of the best round's ``reward_of``
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}

    def offer(self, labelled: Round) -> bool:
        """Return whether the current team, which sampled these candidates, may continue. Stores it
        if it is the best so far; restores the best, and returns False, if it is significantly
        worse."""
        mean, error = reward_of(labelled)
        if mean >= self.mean:
            self.mean, self.error = mean, error
            self.tensors = {name: _copies(tensors_of(part)) for name, part in self.parts.items()}
        elif self.mean - mean > ERRORS * math.hypot(error, self.error):
            for name, part in self.parts.items():
                load_part(part, _copies(self.tensors[name]))  # the part may keep these tensors
            return False
        return True

    def state_tensors(self) -> dict[str, torch.Tensor]:
        held = {
            f"{name}/{key}": tensor
            for name, part in self.tensors.items()
            for key, tensor in part.items()
        }
        return {"reward": torch.tensor([self.mean, self.error], dtype=torch.float64)} | held

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.mean, self.error = tensors["reward"].tolist()
        self.tensors = {name: {} for name in self.parts} if len(tensors) > 1 else {}
        for path, tensor in tensors.items():
            name, slash, key = path.partition("/")
            if slash:
                self.tensors[name][key] = tensor


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}


def reward_of(labelled: Round) -> tuple[float, float]:
    """Return the mean task reward of a round's candidates and its standard error, which is over
    tasks, because a task's candidates are not independent; infinite if there are too few tasks."""
    means = [fmean(c.reward for c in t.candidates.candidates_K) for t in labelled.tasks]
    if len(means) < FEWEST:
        return fmean(means), math.inf
    return fmean(means), math.sqrt(variance(means) / len(means))
