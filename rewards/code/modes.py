"""The code domain's external modes, which show the agents parts of the reward's breakdown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.diagnosis import checked_slice, diagnostics, levels
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt

WORD = {True: "passed", False: "failed", None: "not reached"}


class Feedback(ABC):
    """Base of the modes: feedback on the attempt, then instructions to revise it."""

    reads = RewardBreakdown

    def __init__(self, prompts: Prompts, sandbox_slice: int | str | None = 1) -> None:
        self.prompts, self.sandbox_slice = prompts, checked_slice(sandbox_slice)

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(
                f"Feedback:\n{self.feedback(attempt, agent)}\n{revision}"
                for agent, revision in enumerate(self.prompts.revision_N(attempt))
            )
            for attempt in attempts
        ]

    @abstractmethod
    def feedback(self, attempt: Attempt, agent: int) -> str:
        """Return the feedback on an attempt for the agent with index ``agent``."""


class LevelFeedback(Feedback):
    """``level_feedback``: the results by level, with the errors and the surfaced tests."""

    def feedback(self, attempt: Attempt, agent: int) -> str:
        return diagnostics(attempt, agent, self.sandbox_slice)


class LevelPassed(Feedback):
    """``level_passed``: the result of each level on the surfaced tests, without explanation."""

    def feedback(self, attempt: Attempt, agent: int) -> str:
        level = levels(attempt, self.sandbox_slice)
        tests = "not reached" if level.tests is None else "{}/{} passed".format(*level.tests)
        alone = len(attempt.completions_N) == 1
        return (
            f"Definitions: {WORD[level.definitions]}. Syntax: {WORD[level.syntax]}. "
            f"Tests: {tests}." + ("" if alone else f" Use of helpers: {WORD[level.use]}.")
        )


class Passed(Feedback):
    """``passed``: one bit: were all levels passed, counting only the surfaced tests."""

    def feedback(self, attempt: Attempt, agent: int) -> str:
        passed = levels(attempt, self.sandbox_slice).all_passed
        return "All levels passed." if passed else "Not all levels passed."
