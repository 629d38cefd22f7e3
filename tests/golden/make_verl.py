"""Golden numbers of verl 0.9.1 (ByteDance, Apache-2.0): run it in its own environment, from
this folder.

    python3 -m venv env
    env/bin/pip install verl==0.9.1 torch
    env/bin/python make_verl.py > verl.json
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import toy
import verl
from verl.trainer.ppo import core_algos

COUNT = len(toy.REWARDS[0])
INDEX = np.repeat(np.arange(len(toy.REWARDS)), COUNT)  # the prompt of each completion
MASK = torch.ones(len(INDEX), 2, dtype=torch.float64)
# The reward is the last token's.
SCORES = torch.tensor([[0.0, r] for rewards in toy.REWARDS for r in rewards], dtype=torch.float64)


def of_groups(found: tuple[torch.Tensor, Any]) -> list[list[float]]:
    """Each completion's advantage, the same at all of its tokens."""
    return found[0][:, -1].view(-1, COUNT).tolist()


def gae() -> dict[str, Any]:
    mask = torch.tensor([[1.0] * n + [0.0] * (4 - n) for n in toy.LENGTHS], dtype=torch.float64)
    values = torch.tensor(toy.VALUES, dtype=torch.float64)
    rewards = torch.tensor(toy.TOKEN_REWARDS, dtype=torch.float64)
    whitened, returns = core_algos.compute_gae_advantage_return(
        rewards, values, mask, toy.GAMMA, toy.LAMBDA
    )
    return {"whitened": whitened.tolist(), "returns": returns.tolist()}


if __name__ == "__main__":
    baselines = torch.tensor(toy.GREEDY, dtype=torch.float64).repeat_interleave(COUNT)
    grpo = core_algos.compute_grpo_outcome_advantage
    print(
        json.dumps(
            {
                "versions": {"verl": verl.__version__},
                "grpo": of_groups(grpo(SCORES, MASK, INDEX)),
                "grpo, not normalized": of_groups(
                    grpo(SCORES, MASK, INDEX, norm_adv_by_std_in_grpo=False)
                ),
                "rloo": of_groups(core_algos.compute_rloo_outcome_advantage(SCORES, MASK, INDEX)),
                "remax": of_groups(
                    core_algos.compute_remax_outcome_advantage(SCORES, baselines, MASK)
                ),
                "gae": gae(),
            },
            indent=1,
        )
    )
