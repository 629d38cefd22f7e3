"""``level_feedback``: what was found, what failed and how, level by level."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt
from rewards.code.breakdown import RewardBreakdown
from rewards.code.diagnosis import checked_slice, diagnostics


class LevelFeedback:
    """Tells each agent the diagnostics of the joint program on the surfaced tests."""

    reads = RewardBreakdown

    def __init__(self, prompts: Prompts, sandbox_slice: int | str | None = 1) -> None:
        self.prompts, self.sandbox_slice = prompts, checked_slice(sandbox_slice)

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(
                f"Feedback:\n{diagnostics(attempt, agent, self.sandbox_slice)}\n{revision}"
                for agent, revision in enumerate(self.prompts.revision_N(attempt))
            )
            for attempt in attempts
        ]
