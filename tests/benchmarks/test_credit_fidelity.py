"""The game whose exact credit is known, and what the algorithms' credit comes to on it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.credit_fidelity import (
    SETTINGS,
    Game,
    Judge,
    critic_credit,
    expected_reward,
    fidelity,
)
from benchmarks.exact_worth import enumerated
from comlrl.types import JointAction, Shape, Task

BY_NAME = {setting.name: setting for setting in SETTINGS}


@pytest.mark.parametrize("numbers", [(3, 1), (2, 9, 4)])
def test_the_closed_form_is_the_mean_of_the_judges_rewards(numbers):
    policies = np.random.default_rng(0).dirichlet(np.ones(9), len(numbers))
    task = Task("t", {"numbers": numbers})

    def reward(action: tuple[int, ...]) -> float:
        written = tuple(str(a + 1) for a in action)
        return Judge().score([JointAction(task, written)])[0].value

    assert expected_reward(numbers, policies) == pytest.approx(enumerated(reward)(policies))


def test_critics_subtract_what_they_know():
    game = Game(2, 0.5)
    (tree,) = game.grow(Shape(2, 1, 4), 1)
    row, rewards = tree.task.fields["numbers"], tree.nodes[0].rewards_K
    everybodys = critic_credit(game, tree, "centralized")
    own = critic_credit(game, tree, "independent")
    for k, reward in enumerate(rewards):
        assert everybodys[0, k, 0] == everybodys[0, k, 1] == pytest.approx(reward - game.value[row])
        rows = [r for r in game.rows if r[1] == row[1]]
        value = sum(game.value[r] for r in rows) / len(rows)
        assert own[0, k, 1] == pytest.approx(reward - value)


def test_counterfactuals_rank_completions_best():
    game = Game(3, 0.0)
    found = {
        name: fidelity(game, BY_NAME[name], 12)
        for name in (
            "align, G = 4",
            "counterfactual, G = 8",
            "counterfactual, G = 8, each joint action",
            "sequential, G = 4, then 2",
            "MAPPO, exact critic, G = 64",
        )
    }
    best = found.pop("counterfactual, G = 8, each joint action")
    assert best.difference > 0.9 > max(each.difference for each in found.values())
    same = found["counterfactual, G = 8"]  # the same update
    assert best.cosine == pytest.approx(same.cosine)
    assert same.advantage > max(e.advantage for n, e in found.items() if "counter" not in n)
    assert (same.scored, found["sequential, G = 4, then 2"].scored) == (8 + 3 * 8 * 7, 16)
