"""``evaluate.py --replace``: which agents of a team are replaced, and by whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comlrl.config.resolved import Config
from comlrl.errors import UserError
from trainers.launch.wiring import weights
from trainers.launch.wiring.weights import Trained

# "untrained", "silent", another agent of the team, or the agent of that place of another team
Other = str | int | Trained
MOST = 5  # agents: every subset of them is evaluated


def parse(items: Sequence[str], teams: Sequence[Trained]) -> dict[str, Other]:
    """Place, as it was written → who acts there. Raises UserError."""
    if items and (len(teams) != 1 or teams[0].model is not None):
        raise UserError("--replace: agents of what? give the run of a team with --checkpoint")
    found: dict[str, Other] = {}
    for item in items:
        place, _, who = item.partition("=")
        if not who or not (place.isdecimal() or place == "all"):
            raise UserError(
                f"--replace: '{item}'; give an agent's number, or all, and who acts in its place: "
                "0=untrained, 0=silent, 0=1 (agent 1), or 0=RUN"
            )
        if place in found or (found and "all" in (place, *found)):
            raise UserError(f"--replace: '{item}' names an agent again; name each once")
        own = int(who) if who.isdecimal() else who
        named = isinstance(own, int) or own in ("untrained", "silent")
        found[place] = own if named else weights.locate(who, "--replace")
    return found


def check(asked: Mapping[str, Other], config: Config) -> dict[int, Other]:
    """The places as numbers. Raises UserError where an agent cannot act there."""
    section, models = config.section, config.agents
    if asked and section.one_policy:
        raise UserError("--replace: the agents of this run act by one policy; none has its own")
    if "all" in asked:
        replaced = dict.fromkeys(range(section.num_agents), asked["all"])
    else:
        replaced = {int(place): who for place, who in asked.items()}
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


def told(who: Other) -> str:
    """Who acts in an agent's place, in words."""
    if isinstance(who, Trained):
        return who.name
    return f"agent {who}" if isinstance(who, int) else who


def pinned(replaced: Mapping[int, Other]) -> dict[int, Other]:
    """The same, with the checkpoints that runs without a final model are read from."""
    return {
        place: weights.pinned(who, "--replace") if isinstance(who, Trained) else who
        for place, who in replaced.items()
    }
