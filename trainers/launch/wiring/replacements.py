"""``evaluate.py --replace``: which agents of a team are replaced, and by whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from comlrl.config.resolved import CommonConfig
from comlrl.config.sections import AgentConfig
from comlrl.errors import UserError, near
from comlrl.trainers.launch.wiring import weights
from comlrl.trainers.launch.wiring.weights import Trained

NOBODY = ("untrained", "silent")
# a name in NOBODY, another agent of the team, or another team, whose agent at the same index acts
Other = str | int | Trained
MOST = 5  # agents, as every subset of them is evaluated


def parse(items: Sequence[str], teams: Sequence[Trained]) -> list[tuple[str, str | Trained]]:
    """Parse ``place=who`` items; ``who`` is a run if its path exists. Raises UserError."""
    if items and (len(teams) != 1 or teams[0].model is not None):
        raise UserError("--replace: needs the run of a team; name it with --checkpoint")
    pairs: list[tuple[str, str | Trained]] = []
    for item in items:
        place, _, who = item.partition("=")
        if not who or not place:
            raise UserError(
                f"--replace: '{item}'; name an agent by role or number, or all, and who acts in "
                "its place: 0=untrained, 0=silent, 0=1 (agent 1), or 0=RUN"
            )
        is_run = not who.isdecimal() and Path(who).exists()
        pairs.append((place, weights.locate(who, "--replace") if is_run else who))
    return pairs


def check(
    pairs: Iterable[tuple[str, str | Trained]],
    section: CommonConfig,
    team: Sequence[AgentConfig],
    roles: Sequence[str],
) -> dict[int, Other]:
    """Return the replacement for each agent index. Raises UserError if one is not possible."""
    size = section.num_agents
    replaced: dict[int, Other] = {}
    for text, other in pairs:
        if section.one_policy:
            raise UserError(
                "--replace: the agents of this run act by one policy, so that none can be replaced"
            )
        who: Other = other
        if isinstance(other, str) and other not in NOBODY:
            who = _agent(other, roles, size, NOBODY, "does not exist, as a run or a role")
        places = [_agent(text, roles, size)] if text != "all" else range(size)
        for place in places:
            item = f"{text}={label(who)}"
            if place in replaced:
                raise UserError(f"--replace: '{item}' names an agent again; name each once")
            if team[place].api and who != "silent":
                raise UserError(f"--replace: '{item}'; a service plays this agent: use silent")
            if isinstance(who, int) and team[who].api:
                raise UserError(f"--replace: '{item}'; a service plays agent {who}: choose another")
            if who == place:
                raise UserError(f"--replace: '{place}={who}' is the team as it is; leave it out")
            if isinstance(who, int) and _base(team[who]) != _base(team[place]):
                raise UserError(
                    f"--replace: '{place}={who}'; agent {who} is '{team[who].model}' and agent "
                    f"{place} '{team[place].model}': use agents of one model and `lora`"
                )
            replaced[place] = who
    if len(replaced) > MOST:
        raise UserError(
            f"--replace: {len(replaced)} agents are {2 ** len(replaced)} teams to evaluate; name "
            f"{MOST} at most"
        )
    return replaced


def _base(agent: AgentConfig) -> tuple[str | None, Any]:
    return agent.model, agent.lora


def _agent(
    text: str,
    roles: Sequence[str],
    size: int,
    more: Sequence[str] = (),
    otherwise: str = "is not an agent of this team",
) -> int:
    """Return the index of an agent named by number or role. Raises UserError."""
    if text.isdecimal() and int(text) < size:
        return int(text)
    if text.isdecimal():
        raise UserError(f"--replace: there is no agent {text}; use 0 to {size - 1}")
    if text in roles:
        return roles.index(text)
    hint = near(text, (*roles, *more), "there are {}")
    raise UserError(f"--replace: '{text}' {otherwise}; {hint}")


def label(who: Other) -> str:
    """Describe a replacement in words."""
    if isinstance(who, Trained):
        return who.name
    return f"agent {who}" if isinstance(who, int) else who
