"""``expert_edits``: an external model proposes compact edits for each agent's part.

The expert is any OpenAI-compatible service. It reads only the problem and the attempt. Its answer
is untrusted text: it is read up to a limit, cleaned of control and special tokens, truncated and
quoted to the agents, but never run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from comlrl.external.service import ExpertError, Service, provider_of
from comlrl.quoting import clean, cut
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, Transition

MAX_IN_FLIGHT = 4  # requests
MAX_EDIT = 800  # characters quoted of an agent's edits

REQUEST = """\
These parts are written by different agents and stand together as one piece of work.

Problem:
{problem}

{parts}

Propose the smallest edits that make the whole right and its parts fit each other. Answer with \
one section for each of {names}: its name in brackets on a line of its own, like [{last}], then \
at most five lines of edits, or "none". Nothing else.
"""


@dataclass
class Fallbacks:
    """The number of attempts that ``plain`` answered in place of the expert."""

    count: int = 0


class ExpertEdits:
    """Asks the expert about each attempt and passes each agent the edits to its part.

    With ``on_error: stop`` the first failure raises ExpertError. With ``on_error: plain``,
    ``plain`` answers instead and ``fallbacks`` counts these attempts. Raises UserError if the
    provider's address is missing or invalid, or its key is unset.
    """

    def __init__(
        self,
        prompts: Prompts,
        model: str,
        base_url: str | None,
        on_error: Literal["stop", "plain"],
        plain: Transition,
        *,
        fallbacks: Fallbacks | None = None,
        **client: Any,  # passed to ``ApiClient``
    ) -> None:
        self.prompts, self.fallbacks = prompts, fallbacks or Fallbacks()
        self._on_error, self._plain = on_error, plain
        user = "external.mode: 'expert_edits'"
        self._service = Service(model, provider_of(model, base_url), user, **client)

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        with ThreadPoolExecutor(MAX_IN_FLIGHT) as pool:
            answers = [pool.submit(self._edits, attempt) for attempt in attempts]
            try:
                return [
                    self._texts(attempt, answer.result())
                    for attempt, answer in zip(attempts, answers, strict=True)
                ]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _texts(self, attempt: Attempt, edits: tuple[str, ...] | None) -> tuple[str, ...]:
        if edits is None:
            self.fallbacks.count += 1
            return self._plain([attempt])[0]
        return tuple(
            f"{_proposal(name, text)}\n{revision}"
            for name, text, revision in zip(
                self.prompts.parts(attempt), edits, self.prompts.revision_N(attempt), strict=True
            )
        )

    def _edits(self, attempt: Attempt) -> tuple[str, ...] | None:
        """Return each agent's edits, or None if the expert failed and ``plain`` is to answer."""
        try:
            answer = self._service.ask(request(self.prompts, attempt))
        except ExpertError as failure:
            if self._on_error == "plain":
                return None
            raise ExpertError(
                f"no edits from the expert {self._service.model!r} at {self._service.url} for "
                f"{attempt.task.task_id!r}: {failure}; check external.expert_model, "
                "external.expert_base_url and the key, or set external.on_error to 'plain'"
            ) from failure
        return split_edits(answer, self.prompts.parts(attempt))


def request(prompts: Prompts, attempt: Attempt) -> str:
    """Return the expert's prompt: the problem and each agent's text, but nothing of the reward."""
    names = prompts.parts(attempt)
    question = REQUEST.format(
        problem=prompts.domain.problem(attempt.task),
        parts="\n\n".join(
            f"[{name}]\n{text.strip() or '(empty)'}"
            for name, text in zip(names, attempt.completions_N, strict=True)
        ),
        last=names[-1],
        names=", ".join(f"`{name}`" for name in names),
    )
    return clean(question)


def split_edits(answer: str, names: Sequence[str]) -> tuple[str, ...]:
    """Split an answer into one part per agent, cleaned and truncated; "" for a missing part.

    A section starts at a line that consists of a name, plain or decorated (``[name]``,
    ``### `name` ``, ``**name**``), or that begins with a name and a colon. Fence lines are dropped,
    and names inside fences start no section. An answer without sections goes to every agent.
    """
    listed = "|".join(map(re.escape, names))
    heading = re.compile(rf"[\s#>*_\[`-]*({listed})(?:\(\))?[\]`*_]*\s*(?::[*_]*\s*(.*))?$")
    parts: dict[str, list[str]] = {}
    loose: list[str] = []
    into, fenced = loose, False
    for line in clean(answer).split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        match = None if fenced else heading.match(line)
        if match:
            into = parts.setdefault(match[1], [])
            line = match[2] or ""
        into.append(line.rstrip())
    sections = [parts.get(name, []) for name in names] if parts else [loose] * len(names)
    return tuple(cut("\n".join(lines).strip("\n"), MAX_EDIT) for lines in sections)


def _proposal(name: str, edits: str) -> str:
    if not edits.strip() or edits.strip(" .").lower() == "none":
        return f"Feedback:\nAn expert proposes no edits to `{name}`."
    return f"Feedback:\nAn expert proposes for `{name}`:\n{edits}"
