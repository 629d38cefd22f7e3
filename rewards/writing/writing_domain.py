"""``domain: writing``: a team summarizes one post, each writer at greater length than the last.

This is the summarization task of the MAGRPO paper (arXiv 2508.04652) on `trl-lib/tldr`, whose rows
hold the post in ``prompt``. The roles are ``concise`` and ``detailed``, and in larger teams also
``detailed2``, ``detailed3`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from comlrl.rewards.writing.writing_prompts import CONCISE, DETAILED, REVISION
from comlrl.rewards.writing.writing_reward import (
    GREATEST,
    LENGTH_RATIO,
    WORDS,
    Summaries,
    WritingReward,
)
from comlrl.types import Domain, JointAction, Score, Task

# The most summaries of 8 to 256 words of which each is 1.6 times as long as the one before.
LARGEST_TEAM = next(n for n in range(2, 99) if WORDS[0] * LENGTH_RATIO[1] ** n > WORDS[1])


class WritingDomain(Domain):
    """Two to eight summaries of a post, scored by ``WritingReward``."""

    fields = ("prompt", "role", "shorter")
    revision = REVISION
    reward = WritingReward

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        post = row.get("prompt")
        if not isinstance(post, str) or not post.strip():
            raise ValueError("there is no text in its field `prompt`")
        if "entry_point" in row:
            raise ValueError("it is a coding problem, with an `entry_point`; use builtin:posts")
        return Task(name, row)

    def roles(self, num_agents: int) -> tuple[str, ...]:
        if not 2 <= num_agents <= LARGEST_TEAM:
            raise ValueError(f"summaries that add to each other need 2 to {LARGEST_TEAM} agents")
        more = (f"detailed{number}" for number in range(2, num_agents))
        return ("concise", "detailed", *more)

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (CONCISE, *[DETAILED] * (num_agents - 1))

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        shorter = ("no words", "one or two sentences", *["a few sentences"] * (num_agents - 2))
        return tuple(
            {"prompt": task.fields["prompt"].rstrip(), "role": role, "shorter": length}
            for role, length in zip(self.roles(num_agents), shorter, strict=True)
        )

    def problem(self, task: Task) -> str:
        return task.fields["prompt"]

    def greatest_reward(self, num_agents: int) -> float | None:
        return GREATEST

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        if not isinstance(score.facts, Summaries):
            return {}
        steps = score.facts.steps
        measured: dict[str, Sequence[float | None]] = {
            "length_ratio": [step.length_ratio for step in steps],
            "unique_ratio": [step.unique_ratio for step in steps],
            "similarity": [step.similarity for step in steps],
            "transition_kinds": [len(step.transitions) for step in steps],
        }
        counts = (steps[0].words[0], *(step.words[1] for step in steps))
        for role, count in zip(self.roles(len(counts)), counts, strict=True):
            measured[f"words/{role}"] = [count]
        present = {name: [v for v in values if v is not None] for name, values in measured.items()}
        return {name: fmean(values) for name, values in present.items() if values}

    def described(self, score: Score) -> Mapping[str, Any]:
        return asdict(score.facts) if isinstance(score.facts, Summaries) else {}


WRITING = WritingDomain()
