"""Conversion of programs' episodes to JSON values: a conversation with its calls in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comlrl.types import Call, Domain, Episode, EpisodeGroup, Score

MAX_TEXT = 20_000  # maximum characters of a problem, message or completion


def played(group: EpisodeGroup, episode: Episode, domain: Domain) -> dict[str, Any]:
    """Return one episode as JSON: ``completions_N`` has each agent's last completion, ``calls``
    all."""
    names = group.names_N
    line: dict[str, Any] = {
        "turn": 1,
        "roles_N": list(names),
        "completions_N": [_last(episode, agent) for agent in range(len(names))],
        "calls": list(_calls(group, episode)),
    }
    if episode.error is not None:
        line["error"] = episode.error[:MAX_TEXT]
    return line | scored(episode.score, domain if episode.joint_action is not None else None)


def scored(score: Score, domain: Domain | None) -> dict[str, Any]:
    """Return a score as JSON. ``domain``: the score's domain; None: leave out the facts."""
    line: dict[str, Any] = {"reward": score.value, "parts": dict(score.parts)}
    if score.by_agent is not None:
        line["rewards_N"] = list(score.by_agent)
    if score.passed is not None:
        line["passed"] = score.passed
    if domain is not None and (facts := domain.described(score)):
        line["facts"] = dict(facts)
    return line


def _last(episode: Episode, agent: int) -> str:
    calls = episode.calls_of(agent)
    return calls[-1].completion.text[:MAX_TEXT] if calls else ""


def _calls(group: EpisodeGroup, episode: Episode) -> Iterator[dict[str, Any]]:
    """Yield each call with the messages that its agent has not read in an earlier one."""
    before: dict[int, Call] = {}
    for call in episode.calls:
        seen = before[call.agent].prompt if call.agent in before else ()
        start = len(seen) if call.prompt[: len(seen)] == seen else 0
        yield {
            "agent": group.names_N[call.agent],
            "read": [
                {"role": m.role, "content": m.content[:MAX_TEXT]} for m in call.prompt[start:]
            ],
            "wrote": call.completion.text[:MAX_TEXT],
            "finished": call.completion.finished,
        }
        before[call.agent] = call
