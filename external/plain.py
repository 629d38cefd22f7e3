"""``plain``: no signal; the prior attempt and the request for a revision."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.types import Attempt
from external.diagnosis import agent_names, instruction


class Plain:
    """Asks each agent to revise its own attempt.

    ``restate`` puts the attempt into the text itself: needed only where the prompt does not show
    it already (``external.history: last`` with ``previous_response: false``), so that an agent
    reads its attempt exactly once under every setting.
    """

    def __init__(self, restate: bool = False) -> None:
        self.restate = restate

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(
                self._text(name, response)
                for name, response in zip(agent_names(attempt), attempt.completions_N, strict=True)
            )
            for attempt in attempts
        ]

    def _text(self, name: str, response: str) -> str:
        if not self.restate:
            return instruction(name)
        return f"Your previous answer:\n{response.strip() or '(empty)'}\n\n{instruction(name)}"
