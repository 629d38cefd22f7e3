"""``level_feedback``: what was found, what failed and how, level by level."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.types import Attempt
from external.diagnosis import agent_names, diagnostics, instruction


class LevelFeedback:
    """Tells each agent the diagnostics of the joint program on the surfaced tests."""

    def __init__(self, sandbox_slice: int | str | None = 1) -> None:
        self.sandbox_slice = sandbox_slice

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(
                f"Feedback:\n{diagnostics(attempt, agent, self.sandbox_slice)}\n{instruction(name)}"
                for agent, name in enumerate(agent_names(attempt))
            )
            for attempt in attempts
        ]
