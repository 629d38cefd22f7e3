"""``evaluate.py --replace``: which agents of a team are replaced, and by whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from comlrl.config.plugins.targets import near
from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.trainers.launch.wiring import weights
from comlrl.trainers.launch.wiring.weights import Trained

NOBODY = ("untrained", "silent")
# one of those, another agent of the team, or the agent of that place of another team
Other = str | int | Trained
MOST = 5  # agents: every subset of them is evaluated


def parse(items: Sequence[str], teams: Sequence[Trained]) -> dict[str, Other]:
    """Map each place, as written, to who acts there; a text that is not a path may be a role.
    Raise UserError."""
    if items and (len(teams) != 1 or teams[0].model is not None):
        raise UserError("--replace: agents of what? give the run of a team with --checkpoint")
    found: dict[str, Other] = {}
    for item in items:
        place, _, who = item.partition("=")
        if not who or not place:
            raise UserError(
                f"--replace: '{item}'; give an agent's role or number, or all, and who acts in its "
                "place: 0=untrained, 0=silent, 0=1 (agent 1), or 0=RUN"
            )
        if place in found or (found and "all" in (place, *found)):
            raise UserError(_again(item))
        if who.isdecimal():
            found[place] = int(who)
        else:
            found[place] = weights.locate(who, "--replace") if Path(who).exists() else who
    return found


def _again(item: str) -> str:
    return f"--replace: '{item}' names an agent again; name each once"


def check(asked: Mapping[str, Other], config: Config, roles: Sequence[str]) -> dict[int, Other]:
    """Return the places as numbers. Raise UserError where an agent cannot act there."""
    section, models = config.section, config.agents
    if asked and section.one_policy:
        raise UserError("--replace: the agents of this run act by one policy; none has its own")
    replaced: dict[int, Other] = {}
    for text, given in asked.items():
        named = range(section.num_agents) if text == "all" else [_place(text, roles)]
        for place in named:
            if place in replaced:
                raise UserError(_again(f"{text}={label(given)}"))
            replaced[place] = _who(given, roles)
    for place, who in replaced.items():
        for agent in (place, who) if isinstance(who, int) else (place,):
            if agent >= section.num_agents:
                raise UserError(
                    f"--replace: there is no agent {agent}; give 0 to {section.num_agents - 1}"
                )
        if who == place:
            raise UserError(f"--replace: '{place}={who}' is the team as it is; leave it out")
        if isinstance(who, int) and models and models[who] != models[place]:
            raise UserError(
                f"--replace: '{place}={who}'; agent {who} is '{models[who]}' and agent {place} "
                f"'{models[place]}': give agents of one model"
            )
    if len(replaced) > MOST:
        raise UserError(
            f"--replace: {len(replaced)} agents are {2 ** len(replaced)} teams to evaluate; name "
            f"{MOST} at most"
        )
    return replaced


def _place(text: str, roles: Sequence[str]) -> int:
    """Return the agent of a number, or of a role. Raise UserError."""
    if text.isdecimal() or text in roles:
        return int(text) if text.isdecimal() else roles.index(text)
    hint = near(text, roles, "there are {}")
    raise UserError(f"--replace: '{text}' is not an agent of this team; {hint}")


def _who(given: Other, roles: Sequence[str]) -> Other:
    """Resolve a replacement, with a role as its agent's number. Raise UserError for an unknown
    name."""
    if not isinstance(given, str) or given in NOBODY:
        return given
    if given in roles:
        return roles.index(given)
    hint = near(given, (*roles, *NOBODY), "give a run, or one of {}")
    raise UserError(f"--replace: '{given}' does not exist, as a run or a role; {hint}")


def label(who: Other) -> str:
    """Describe in words who acts in an agent's place."""
    if isinstance(who, Trained):
        return who.name
    return f"agent {who}" if isinstance(who, int) else who


def pinned(replaced: Mapping[int, Other]) -> dict[int, Other]:
    """Pin the checkpoints that runs without a final model are read from."""
    return {
        place: weights.pinned(who, "--replace") if isinstance(who, Trained) else who
        for place, who in replaced.items()
    }
