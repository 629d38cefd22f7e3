"""``generation.vllm_url``: the servers of each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comlrl.errors import UserError
from comlrl.rollout.vllm.replies import KEY


def urls(given: Any, models: Sequence[str], roles: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the addresses of the servers of each policy, in their order.

    Args:
        given: the value of the key.
        models: the model of each policy.
        roles: the agents'.

    Raises UserError for an invalid address, for a policy without a server, and for a server of two
    models.
    """
    if isinstance(given, Mapping):
        urls_N = _of_mapping(given, models, roles if len(roles) == len(models) else ())
    else:
        urls_N = (_addresses(KEY, given),) * len(models)
    model_of: dict[str, str] = {}
    for model, own in zip(models, urls_N, strict=True):
        for url in own:
            if model_of.setdefault(url, model) != model:
                raise UserError(
                    f"{KEY}: '{url}' is for '{model_of[url]}' and '{model}', and a server holds "
                    "one model; give each its own: {MODEL: URL, MODEL: URL}"
                )
    return urls_N


def _of_mapping(
    given: Mapping[str, Any], models: Sequence[str], roles: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Read a mapping of addresses. ``roles``: of the policies; empty where one policy acts for
    several agents."""
    names = tuple(dict.fromkeys([*roles, *models]))
    for name in given:
        if name not in names:
            raise UserError(
                f"{KEY}: '{name}' is not an agent's role or model; there are {_list(names)}"
            )
    found = []
    for index, model in enumerate(models):
        own = [name for name in (*roles[index : index + 1], model) if name in given]
        if not own:
            raise UserError(f"{KEY}: no server for '{model}'; give {{{model}: URL}}")
        found.append(_addresses(f"{KEY}.{own[0]}", given[own[0]]))
    return tuple(found)


def _addresses(key: str, given: Any) -> tuple[str, ...]:
    found = given if isinstance(given, list) else [given]
    if given is None or not found:
        raise UserError(
            f"{key}: {'null' if given is None else given} with generation.backend=vllm; give the "
            "server's address, or a list of several"
        )
    for url in found:
        if not isinstance(url, str):
            raise UserError(f"{key}: {url!r} is not an address; give e.g. http://localhost:8000")
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{key}: '{url}'; give it with http:// before it")
    plain = [url.rstrip("/").removesuffix("/v1") for url in found]
    twice = [url for url in plain if plain.count(url) > 1]
    if twice:
        raise UserError(f"{key}: '{twice[0]}' appears twice; give each server once")
    return tuple(plain)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)
