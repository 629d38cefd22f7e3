"""``agents.ROLE.api``: the services that play agents of a team."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from comlrl.types import Sampler

if TYPE_CHECKING:
    from comlrl.rollout.api_member import ApiMember, MixedSampler

Inner = TypeVar("Inner", bound=Sampler)


def members(agents: Any, folder: Path | None = None) -> dict[int, ApiMember]:
    """Return the services by the index of the agent that each plays.

    ``agents``: the key's value. ``folder``: stores their answers; None: in memory only. Raises
    UserError for a missing API key and a malformed address.
    """
    from comlrl.rollout.api_member import ApiMember  # imports an HTTP client

    entries = agents.items() if isinstance(agents, Mapping) else ()
    file = f"process_{os.environ.get('RANK', '0')}.jsonl"
    return {
        i: ApiMember(role, agent.api, cache=folder and folder / f"agent_{i}" / file)
        for i, (role, agent) in enumerate(entries)  # of all agents, in order
        if agent.api is not None
    }


def metrics(services: Mapping[int, ApiMember]) -> dict[str, float]:
    """Return the services' usage since the last call."""
    return {
        f"agent_{agent}/api/{name}": value
        for agent, service in services.items()
        for name, value in service.metrics().items()
    }


def mixed(inner: Inner, services: Mapping[int, ApiMember]) -> Inner | MixedSampler:
    """Return ``inner``, or a sampler that also queries the services that play agents."""
    if not services:
        return inner
    from comlrl.rollout.api_member import MixedSampler

    return MixedSampler(inner, services)
