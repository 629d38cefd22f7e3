"""The team whose own labels were the best so far, to return to when a later one is worse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, variance

import torch

from comlrl.loop.checkpoint import load_part, tensors_of
from comlrl.loop.parts import Part
from comlrl.preferences.pairs import Round

ERRORS = 3.0  # standard errors of the difference; a smaller one is noise between rounds' tasks
FEWEST = 6  # tasks of a round whose deviation tells how much others differ


class BestRound:
    """Weights and optimizer states at the start of the round with the best labels.

    A part of checkpoints; tensors are held on the CPU.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Set up the keeper. ``parts``: what is restored, by name."""
        self.parts = parts
        self.mean, self.error = -math.inf, 0.0  # of the reward of the round's candidates
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}

    def offer(self, labelled: Round) -> bool:
        """Return whether the present team, which has made these candidates, may continue. It is
        kept where it is the best so far; where it has fallen below that, the best is restored in
        its place."""
        mean, error = reward_of(labelled)
        if mean >= self.mean:
            self.mean, self.error = mean, error
            self.tensors = {name: _copies(tensors_of(part)) for name, part in self.parts.items()}
        elif self.mean - mean > ERRORS * math.hypot(error, self.error):
            for name, part in self.parts.items():
                load_part(part, _copies(self.tensors[name]))  # it may keep what it is given
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
    """Return the mean task reward of a round's candidates, and its standard error: over tasks,
    whose candidates are not independent draws; infinite where there are too few to tell."""
    means = [fmean(c.reward for c in t.candidates.candidates_K) for t in labelled.tasks]
    if len(means) < FEWEST:
        return fmean(means), math.inf
    return fmean(means), math.sqrt(variance(means) / len(means))
