"""``level_passed``: for each level of the reward, whether it was passed."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.types import Attempt
from external.analysis import agent_names, instruction, levels

WORD = {True: "passed", False: "failed", None: "not reached"}


class LevelPassed:
    """Tells each agent one word for each level, the tests' on the surfaced tests."""

    def __init__(self, sandbox_slice: int | str | None = 1) -> None:
        self.sandbox_slice = sandbox_slice

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(f"{self._signals(attempt)}\n{instruction(n)}" for n in agent_names(attempt))
            for attempt in attempts
        ]

    def _signals(self, attempt: Attempt) -> str:
        level = levels(attempt, self.sandbox_slice)
        last = "Tests" if len(attempt.completions_N) == 1 else "Tests and use of helpers"
        return (
            f"Feedback:\nDefinitions: {WORD[level.definitions]}. "
            f"Syntax: {WORD[level.syntax]}. {last}: {WORD[level.tests_and_use]}."
        )
