"""What a run works on: domain, prompts and reward, from their names in the configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from comlrl.config.sections import Config, ConfigError

if TYPE_CHECKING:
    from comlrl.tasks.prompts import Prompts
    from comlrl.types import Domain, Reward

BUILTIN = ("code",)


def load_domain(config: Config) -> Domain:
    """``domain`` as the object that it names. Raises ConfigError."""
    if config.domain == "code":
        from rewards.code.domain import CODE

        return CODE
    raise ConfigError(
        f"domain: '{config.domain}' is none; give {', '.join(BUILTIN)} or module:NAME"
    )


def load_prompts(config: Config) -> Prompts:
    """The domain's prompts, with those of ``prompts`` in their places. Raises ConfigError."""
    from comlrl.tasks.prompts import Prompts

    domain = load_domain(config)
    try:
        domain.roles(config.section.num_agents)
        domain.check_arguments(config.reward.arguments, config.section.num_agents)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Prompts(domain, config.prompts)


def build_reward(config: Config) -> Reward:
    """The reward, its workers started lazily. Raises ConfigError, and what its class raises."""
    from inspect import signature

    sandbox = config.sandbox
    offered = {
        "workers": sandbox_workers(sandbox.workers),
        "timeout": sandbox.timeout,
        "memory_mb": sandbox.memory_mb,
        "isolation": sandbox.isolation,
    }
    made = load_domain(config).reward
    taken = {name: offered[name] for name in signature(made).parameters if name in offered}
    return made(**taken, **config.reward.arguments)


def sandbox_workers(workers: int | None) -> int:
    """This process's part of the machine's sandbox workers (None: its cores)."""
    from comlrl.processes import distributed

    whole = workers or len(os.sched_getaffinity(0))
    return max(1, whole // distributed.local_world_size())
