"""``domain: arena-lock``: does credit cross a long horizon?

Each of two agents has a secret number from 0 to 2, and both play T turns. At turn 1 an agent writes
its secret; at later turns, the sum of its secret and its partner's last answer, modulo 3. An error
is final, and the agents are not told of it. With ``reward.arguments.pay: sparse`` the reward is 1
at turn T if all answers were right; with ``dense`` it is 1/T at each turn while all answers so far
are right.

Rows have ``secrets``, one per agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from comlrl.rewards.arena.game import Bounds, Game, GameReward, PartnersAnswer
from comlrl.types import JointAction, Task, Transition

SYMBOLS = tuple("012")
PROMPT = """\
Your secret is {secret}. Your partner has a secret too.
Write your secret, 0, 1 or 2, and nothing else.
"""
REVISION = """\
Your secret is {secret}. Write the sum of both, modulo 3, and nothing else.
"""


def floor(turns: int, pay: str = "sparse") -> float:
    """Return 9^−T (sparse) or (1/T) Σ_t 9^−t (dense): both agents answer at random."""
    both = len(SYMBOLS) ** -2
    if pay == "sparse":
        return both**turns
    return sum(both**turn for turn in range(1, turns + 1)) / turns


def optimum() -> float:
    """Return 1: each agent knows everything that its right answer depends on."""
    return 1.0


def right_answers(secrets: Sequence[int], before: Sequence[str] | None) -> tuple[str, ...]:
    """Return the right answers of the two agents after the answers ``before`` (None at turn 1)."""
    last = [0, 0] if before is None else [int(answer) for answer in reversed(before)]
    return tuple(
        SYMBOLS[(secret + received) % 3] for secret, received in zip(secrets, last, strict=True)
    )


class LockReward(GameReward):
    """1 at the last turn (sparse) or 1/T at each turn (dense) while all answers are right.

    Args:
        num_turns: T of the run.
        pay: when right answers are rewarded.
    """

    def __init__(self, num_turns: int, pay: Literal["sparse", "dense"] = "sparse") -> None:
        self.num_turns, self.pay = num_turns, pay

    def value(self, action: JointAction) -> float:
        if self.pay == "sparse" and action.turn < self.num_turns:
            return 0.0
        if not all_right(action):
            return 0.0
        return 1.0 if self.pay == "sparse" else 1 / self.num_turns


def all_right(action: JointAction) -> bool:
    """Return whether all answers up to this turn are right; illegal answers are wrong."""
    before = None
    for past in action.as_past:
        answers = LOCK.answers(past)
        if answers != right_answers(action.task.fields["secrets"], before):
            return False
        before = [str(answer) for answer in answers]
    return True


class Lock(Game):
    """Two agents, each with a secret."""

    name = "arena-lock"
    fields = ("secret",)
    revision = REVISION
    reward = LockReward

    def check_row(self, row: Mapping[str, Any]) -> None:
        secrets = row.get("secrets")
        if (
            not isinstance(secrets, list)
            or len(secrets) != 2
            or not all(type(secret) is int and 0 <= secret <= 2 for secret in secrets)
        ):
            raise ValueError("its field `secrets` is not two numbers from 0 to 2")

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (PROMPT, PROMPT)

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        return tuple({"secret": str(secret)} for secret in task.fields["secrets"])

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        return SYMBOLS

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        return Bounds(floor(num_turns, reward.pay), optimum())

    def modes(self) -> Mapping[str, Callable[..., Transition]]:
        return {"partner": PartnersAnswer}


LOCK = Lock()
