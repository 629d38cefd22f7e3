"""``plain``: the previous attempt and a request to revise it, without feedback."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt


class Plain:
    """Asks each agent to revise its own attempt.

    The text repeats the attempt only if the prompt does not already show it
    (``external.history: last`` with ``previous_response: false``), so an agent reads its attempt
    exactly once under every setting.
    """

    def __init__(self, prompts: Prompts, history: str = "full", previous_response: bool = True):
        self.prompts = prompts
        self.restates = history == "last" and not previous_response

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return [
            tuple(
                self._text(response, revision)
                for response, revision in zip(
                    attempt.completions_N, self.prompts.revision_N(attempt), strict=True
                )
            )
            for attempt in attempts
        ]

    def _text(self, response: str, revision: str) -> str:
        if not self.restates:
            return revision
        return f"Your previous answer:\n{response.strip() or '(empty)'}\n\n{revision}"
