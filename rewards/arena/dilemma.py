"""``domain: arena-dilemma``: what do agents do that are paid separately?

The prisoner's dilemma. Each of two agents gets a separate reward: 3 each if both cooperate, 1 each
if both defect, and 5 and 0 if only one defects. Defecting pays more whatever the other agent does,
so independent learners with separate rewards defect. With ``reward.by_agent: mean`` both learn from
the mean, and cooperating pays more. Over several turns each agent reads the other's last move, so
reciprocity can pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comlrl.rewards.arena.game import Bounds, Game, PartnersAnswer
from comlrl.types import JointAction, Reward, Score, Task, Transition

COOPERATE, DEFECT = MOVES = ("cooperate", "defect")
PAYOFF = {  # moves → points of each agent
    (COOPERATE, COOPERATE): (3.0, 3.0),
    (COOPERATE, DEFECT): (0.0, 5.0),
    (DEFECT, COOPERATE): (5.0, 0.0),
    (DEFECT, DEFECT): (1.0, 1.0),
}
LEAST = (0.0, 0.0)  # if an answer is illegal
PROMPT = """\
You and a partner each cooperate or defect. Both cooperate: 3 points each.
Both defect: 1 point each. Who defects alone gets 5 points, and the other 0.
Write cooperate or defect and nothing else.
"""
REVISION = """\
Next round: write cooperate or defect and nothing else.
"""


def floor(turns: int = 1) -> float:
    """Return 1 per turn: both agents defect, the only equilibrium of a single turn."""
    return float(turns)


def optimum(turns: int = 1) -> float:
    """Return 3 per turn: both agents cooperate, which maximizes their mean reward."""
    return 3.0 * turns


class DilemmaReward(Reward):
    """Each agent's points for the two moves, or 0 for both if an answer is illegal."""

    by_agent = True

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        return [self._score(action) for action in actions]

    @staticmethod
    def _score(action: JointAction) -> Score:
        first, second = DILEMMA.answers(action)
        points = LEAST if first is None or second is None else PAYOFF[first, second]
        return Score(sum(points) / 2, by_agent=points)


class Dilemma(Game):
    """Two agents that read the same prompt and get separate rewards."""

    name = "arena-dilemma"
    revision = REVISION
    reward = DilemmaReward

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (PROMPT, PROMPT)

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        return MOVES

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        """Return ``cooperation``, the share of agents that cooperate, and ``legal_answers``."""
        answers = self.answers(action)
        share = answers.count(COOPERATE) / len(answers)
        return {**super().measures(action, score), "cooperation": share}

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        """Return the bounds of the agents' mean reward."""
        return Bounds(floor(num_turns), optimum(num_turns))

    def modes(self) -> Mapping[str, Callable[..., Transition]]:
        return {"partner": PartnersAnswer}


DILEMMA = Dilemma()
