"""``passed``: one bit, whether every level of the reward was passed."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt
from rewards.code.breakdown import RewardBreakdown
from rewards.code.diagnosis import checked_slice, levels


class Passed:
    """Tells each agent whether all levels were passed, the tests' on the surfaced tests."""

    reads = RewardBreakdown

    def __init__(self, prompts: Prompts, sandbox_slice: int | str | None = 1) -> None:
        self.prompts, self.sandbox_slice = prompts, checked_slice(sandbox_slice)

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(f"{self._signal(attempt)}\n{text}" for text in self.prompts.revision_N(attempt))
            for attempt in attempts
        ]

    def _signal(self, attempt: Attempt) -> str:
        passed = levels(attempt, self.sandbox_slice).all_passed
        return "Feedback:\nAll levels passed." if passed else "Feedback:\nNot all levels passed."
