"""Checks of a user's domain, reward and external mode: results are validated before training uses
them, and exceptions are reported in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from comlrl.config.plugins.targets import Target, TargetError
from comlrl.quoting import without_surrogates
from comlrl.types import Attempt, Domain, JointAction, Reward, Score, Task, Transition

REFUSING = ("task", "roles", "check_arguments")  # methods that reject arguments by ValueError
METHODS = [name for name in vars(Domain) if name[0] != "_" and callable(getattr(Domain, name))]
LARGEST = 1e15  # absolute value of a reward
TOLERANCE = 1e-6  # relative, for the sum of a score's parts


class CheckedReward(Reward):
    """A user's reward, which may return plain numbers and omit ``close`` and ``for_evaluation``.

    Raises TargetError if it raises, or returns anything but scores.
    """

    def __init__(self, reward: Any, target: Target, by_agent: bool = False) -> None:
        """Initialize. ``by_agent``: whether the class declares a reward for each agent."""
        self.reward, self.target, self.by_agent = reward, target, by_agent

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        if not actions:  # an empty shard, which the user's code need not handle
            return []
        with self.target.calling():
            returned = self.reward.score(actions)
            returned_scores = list(returned) if isinstance(returned, Iterable) else None
        if returned_scores is None or len(returned_scores) != len(actions):
            count = shown(returned) if returned_scores is None else f"{len(returned_scores)} scores"
            raise TargetError(
                f"{self.target} returned {count} for {len(actions)} joint actions; return a list "
                "with one score for each, in their order"
            )
        scores = []
        for given_score, action in zip(returned_scores, actions, strict=True):
            where = f"{self.target}, task '{action.task.task_id}': returned"
            scores.append(checked_score(given_score, len(action.completions_N), where))
            if scores[-1].by_agent is not None and not self.by_agent:
                raise TargetError(
                    f"{where} by_agent, which its class does not declare; add the class attribute "
                    "by_agent = True"
                )
        return scores

    def for_evaluation(self) -> Reward:
        if not hasattr(self.reward, "for_evaluation"):
            return self
        with self.target.calling():
            return CheckedReward(self.reward.for_evaluation(), self.target, self.by_agent)

    def close(self) -> None:
        if hasattr(self.reward, "close"):
            with self.target.calling():
                self.reward.close()


class CheckedTransition:
    """A user's external mode. Raises TargetError if it raises, or returns anything but texts."""

    def __init__(self, transition: Transition, target: Target) -> None:
        self.transition, self.target = transition, target

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        with self.target.calling():
            feedback = [tuple(texts) for texts in self.transition(attempts)]
        if len(feedback) != len(attempts):
            raise TargetError(
                f"{self.target} answered {len(feedback)} of {len(attempts)} attempts; answer each"
            )
        for attempt, texts in zip(attempts, feedback, strict=True):
            agents = len(attempt.completions_N)
            if len(texts) != agents or not all(isinstance(text, str) for text in texts):
                raise TargetError(
                    f"{self.target} returned {shown(texts)} for {agents} agents; return one text "
                    "for each"
                )
        return [tuple(map(without_surrogates, texts)) for texts in feedback]


class CheckedDomain:
    """A user's domain. Raises TargetError if it raises, or if a field has no value."""

    def __init__(self, domain: Domain, target: Target) -> None:
        self._domain, self._target = domain, target

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._domain, name)
        if name not in METHODS:
            return attribute

        def call(*arguments: Any) -> Any:
            with self._target.calling(passing=ValueError if name in REFUSING else ()):
                return attribute(*arguments)

        return call

    def for_chat(self) -> CheckedDomain:
        with self._target.calling():
            domain = self._domain.for_chat()
        return self if domain is self._domain else CheckedDomain(domain, self._target)

    def styles(self) -> dict[str, CheckedDomain]:
        with self._target.calling():
            styles = self._domain.styles()
            return {name: CheckedDomain(each, self._target) for name, each in styles.items()}

    def described(self, score: Score) -> Mapping[str, Any]:
        with self._target.calling():
            return json.loads(json.dumps(dict(self._domain.described(score) or {}), default=_plain))

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        with self._target.calling():
            values_N = tuple(self._domain.values(task, num_agents))
            missing = [name for v in values_N for name in self._domain.fields if name not in v]
        if len(values_N) != num_agents or missing:
            what = f"no `{missing[0]}`" if missing else f"{len(values_N)} values"
            raise TargetError(
                f"{self._target} returned {what} for task '{task.task_id}' and {num_agents} "
                "agents; return one mapping for each agent, with a value for every field"
            )
        return tuple(
            {name: without_surrogates(v) if isinstance(v, str) else v for name, v in values.items()}
            for values in values_N
        )


def checked_score(returned: Any, agents: int, where: str) -> Score:
    """Check a user's score for ``agents`` agents, a Score or a plain number; return it as a Score.

    Raises TargetError, whose message begins with ``where``, if it is invalid.
    """
    score = returned if isinstance(returned, Score) else Score(number(returned))
    parts = score.parts
    if not (isinstance(parts, Mapping) and all(isinstance(name, str) for name in parts)):
        raise TargetError(f"{where} parts={shown(parts)}; return a mapping from names to numbers")
    score = replace(
        score,
        value=number(score.value),
        parts={without_surrogates(name): number(value) for name, value in parts.items()},
        task_reward=None if score.task_reward is None else number(score.task_reward),
    )
    if not all(map(fits, (score.value, score.task_value, *score.parts.values()))):
        what = "as a score or part" if isinstance(returned, Score) else "as a score"
        raise TargetError(
            f"{where} {shown(returned)} {what}; return finite numbers of at most {LARGEST:g}"
        )
    total = math.fsum(score.parts.values())
    if score.parts and abs(total - score.task_value) > TOLERANCE * max(1.0, abs(total)):
        raise TargetError(
            f"{where} {score.task_value:g}, and parts that sum to {total:g}; return parts that sum "
            "to the value"
        )
    if score.passed is not None and number(score.passed) not in (0, 1):
        raise TargetError(
            f"{where} passed={shown(score.passed)}; return true, false or, if there is no "
            "passing, None"
        )
    passed = None if score.passed is None else bool(score.passed)
    return replace(score, passed=passed, by_agent=_by_agent(score, agents, where))


def _by_agent(score: Score, agents: int, where: str) -> tuple[float, ...] | None:
    """Check and return each agent's reward; None if the score has none."""
    if score.by_agent is None:
        return None
    returned = score.by_agent
    listed = isinstance(returned, Iterable) and not isinstance(returned, str)
    reward_N = tuple(map(number, returned)) if listed else ()
    if len(reward_N) != agents or not all(map(fits, reward_N)):
        raise TargetError(
            f"{where} by_agent={shown(returned)}; return {agents} finite numbers, one for each "
            "agent"
        )
    mean = math.fsum(reward_N) / agents
    if abs(mean - score.task_value) > TOLERANCE * max(1.0, *map(abs, reward_N)):
        raise TargetError(
            f"{where} {score.task_value:g}, and by_agent with a mean of {mean:g}; return the mean "
            "as the value"
        )
    return reward_N


def fits(number: float) -> bool:
    """Return whether a reward can be squared and summed in the float32 of a loss."""
    return abs(number) <= LARGEST


def number(value: Any) -> float:
    """Convert a number or one-element array to float; return NaN for anything else."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # e.g. an array of several
        return math.nan


def _plain(value: Any) -> Any:
    """Convert a NumPy value or a tensor for JSON. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a fact is a {type(value).__name__}, which JSON lacks")


def shown(value: Any) -> str:
    """Return a value for one line of a message, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
