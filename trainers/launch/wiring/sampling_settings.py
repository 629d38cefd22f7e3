"""Sampling settings of each agent: ``sampling``, else the section, else ``agent_model``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from comlrl.config.keys import out_of_range
from comlrl.config.resolved import Config
from comlrl.config.sections import RoleSampling
from comlrl.errors import UserError, near
from comlrl.quoting import without_surrogates
from comlrl.types import Sampling

KEYS = tuple(field.name for field in fields(RoleSampling))


def sampling(config: Config, roles: Sequence[str], greedy: bool = False) -> Sampling:
    """Return the sampling settings of the agents or of a baseline's agents, by their roles. A null
    in the section is replaced by the value in ``agent_model``."""
    section, model = config.section, config.agent_model
    drawn: dict[str, Any] = {
        name: getattr(model if getattr(section, name) is None else section, name)
        for name in ("temperature", "top_p", "top_k")
    }
    common = Sampling(max_new_tokens=section.max_new_tokens, stop=tuple(model.stop), **drawn)
    if greedy:
        common = replace(common, temperature=0.0)
    return _of_team(common, [_with_role(common, config.role_sampling.get(role)) for role in roles])


def evaluated(config: Config, roles: Sequence[str], greedy: bool = False) -> Sampling:
    """Return the agents' sampling settings in evaluations (section ``evaluation``)."""
    trained, changes = sampling(config, roles, greedy), asdict(config.evaluation)
    if greedy:
        changes |= {"temperature": None, "top_p": None}
    changed = {key: value for key, value in changes.items() if value is not None}
    settings_N = [replace(trained.for_agent(i), **changed) for i in range(len(roles))]
    return _of_team(replace(trained, by_agent=(), **changed), settings_N)


def _of_team(common: Sampling, settings_N: Sequence[Sampling]) -> Sampling:
    different = set(settings_N)
    if len(different) > 1:
        return replace(common, by_agent=tuple(settings_N))
    return settings_N[0] if settings_N else common


def _with_role(common: Sampling, section: RoleSampling | None) -> Sampling:
    if section is None:
        return common
    values: dict[str, Any] = {key: getattr(section, key) for key in KEYS}
    if common.temperature == 0:
        del values["temperature"]
    if values["stop"] is not None:
        values["stop"] = tuple(values["stop"])
    return replace(common, **{key: value for key, value in values.items() if value is not None})


def check(config: Config, roles: Sequence[str]) -> None:
    """Raise UserError for an unknown role, and for limits and stops that cannot work."""
    _check_stops("agent_model.stop", config.agent_model.stop)
    room, evaluated = config.agent_model.max_length, config.evaluation.max_new_tokens
    if evaluated is not None and evaluated >= room:
        raise UserError(
            f"evaluation.max_new_tokens: {evaluated} leaves no room for a prompt in "
            f"agent_model.max_length={room}; lower it"
        )
    for role, section in config.role_sampling.items():
        key = f"sampling.{role}" if role in config.sampling else f"agents.{role}.sampling"
        if role not in roles:
            raise UserError(f"{key}: no agent has this role; {near(role, roles, 'there are {}')}")
        for problem in out_of_range(key, section):
            raise UserError(problem)
        _check_stops(f"{key}.stop", section.stop or ())
        if section.max_new_tokens is not None and section.max_new_tokens >= room:
            raise UserError(
                f"{key}.max_new_tokens: {section.max_new_tokens} leaves no room for a prompt in "
                f"agent_model.max_length={room}; lower it"
            )
        apart = [n for n in ("temperature", "top_p", "top_k") if getattr(section, n) is not None]
        if apart and config.section.one_policy:
            raise UserError(
                f"{key}.{apart[0]}: {getattr(section, apart[0])} with {config.algorithm}, whose "
                "agents act by one policy: it is the same for all of them; set "
                f"{config.algorithm}.{apart[0]} (max_new_tokens and stop may differ)"
            )


def _check_stops(key: str, stops: Sequence[Any]) -> None:
    for stop in stops:
        if not isinstance(stop, str) or not stop or without_surrogates(stop) != stop:
            reason = "is in every text" if stop == "" else "is not a text that a model can write"
            raise UserError(f"{key}: {stop!r} {reason}; use a list of texts, e.g. ['</answer>']")
