"""``level_passed``: four signals, one for each level of the reward, without a word of why."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt
from rewards.code.breakdown import RewardBreakdown
from rewards.code.diagnosis import checked_slice, levels

WORD = {True: "passed", False: "failed", None: "not reached"}


class LevelPassed:
    """Tells each agent whether the functions were found and compile, how many of the surfaced
    tests passed, and whether main makes use of the helpers."""

    reads = RewardBreakdown

    def __init__(self, prompts: Prompts, sandbox_slice: int | str | None = 1) -> None:
        self.prompts, self.sandbox_slice = prompts, checked_slice(sandbox_slice)

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(f"{self._signals(attempt)}\n{text}" for text in self.prompts.revision_N(attempt))
            for attempt in attempts
        ]

    def _signals(self, attempt: Attempt) -> str:
        level = levels(attempt, self.sandbox_slice)
        tests = "not reached" if level.tests is None else "{}/{} passed".format(*level.tests)
        alone = len(attempt.completions_N) == 1
        return (
            f"Feedback:\nDefinitions: {WORD[level.definitions]}. Syntax: {WORD[level.syntax]}. "
            f"Tests: {tests}." + ("" if alone else f" Use of helpers: {WORD[level.use]}.")
        )
