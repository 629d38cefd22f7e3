"""What a run works on: domain, prompts, reward and mode, from their names in the configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comlrl.config.plugins.arguments import keywords
from comlrl.config.plugins.modules import Source
from comlrl.config.plugins.targets import Target, check_class, check_methods, load, near
from comlrl.config.resolved import Config
from comlrl.config.sections import ExternalConfig
from comlrl.errors import UserError
from comlrl.rollout.checked import METHODS, CheckedDomain, CheckedReward, CheckedTransition
from comlrl.tasks.prompts import REVISION, Prompts, check_templates
from comlrl.types import Domain, Reward

if TYPE_CHECKING:
    from comlrl.models.team import Team
    from comlrl.types import Transition
    from external.expert_edits import Fallbacks

BUILTIN = ("code", "writing")
OPTIONAL = ("for_evaluation", "close")  # of a reward
NEEDED = ("task", "roles", "templates", "values", "problem")  # of a domain; it inherits the others


def load_domain(config: Config) -> Domain:
    """``domain`` as the object that it names. Raises UserError."""
    if config.domain == "code":
        from rewards.code.domain import CODE

        return CODE
    if config.domain == "writing":
        from rewards.writing.domain import WRITING

        return WRITING
    target = _domain_target(config)
    return CheckedDomain(target.found, target)


def load_prompts(config: Config, team: Team | None = None) -> Prompts:
    """The domain's prompts, with those of ``prompts`` in their places. Raises UserError.

    ``team``: who reads them, each in words for its model; None: not known, or of no account.
    """
    chats_N = [team.of(i).chats for i in range(config.section.num_agents)] if team else []
    return Prompts(load_domain(config), config.prompts, chats_N)


def build_reward(config: Config) -> Reward:
    """The reward, its workers started lazily. Raises UserError, and what its class raises."""
    cls, target = _reward(config)
    given = _arguments(config, cls)
    if target is None:
        return cls(**given)
    with target.calling():
        made = cls(**given)
    return CheckedReward(made, target)


def build_transition(
    config: Config, prompts: Prompts, fallbacks: Fallbacks | None = None
) -> Transition:
    """The external mode. ``fallbacks`` counts the attempts answered in an expert's place."""
    import external

    section = with_mode(config, prompts)
    made = external.build(section, prompts, fallbacks, config.folder)
    if ":" in config.domain and section.mode in prompts.domain.modes():
        target = dataclasses.replace(_domain_target(config), key="external.mode")
        return CheckedTransition(made, target)
    return made


def with_mode(config: Config, prompts: Prompts) -> ExternalConfig:
    """``external`` with its mode named. Null is the domain's first, which may read what its own
    reward alone finds, so that with another reward it is ``plain``."""
    from external import default_mode

    given, other = config.external, config.reward.target is not None
    default = "plain" if other else default_mode(prompts)
    return dataclasses.replace(given, mode=given.mode or default)


def check(config: Config) -> None:
    """Refuse what cannot work, before anything heavy loads. Raises UserError."""
    prompts, agents = load_prompts(config), config.section.num_agents
    try:
        roles = prompts.domain.roles(agents)
    except ValueError as error:
        raise UserError(f"{config.algorithm}.num_agents: {agents}; {error}") from error
    check_templates(prompts, roles, agents)
    _check_revision(config, prompts)
    cls, _ = _reward(config)
    _arguments(config, cls)
    if config.reward.target is None:
        try:
            prompts.domain.check_arguments(config.reward.arguments, agents)
        except ValueError as error:
            raise UserError(str(error)) from error
    mode_reads(config, prompts)
    _check_facts(config, prompts, cls)


def _check_revision(config: Config, prompts: Prompts) -> None:
    """Raises UserError where feedback follows, and nothing says what is to be done with it."""
    turns, own = config.section.num_turns, prompts.own.get(REVISION, prompts.domain.revision)
    if turns > 1 and not own:
        raise UserError(
            f"{config.algorithm}.num_turns: {turns}, and domain '{config.domain}' has no "
            "`revision`, with which feedback ends; give it one, prompts.revision, or num_turns=1"
        )


def _check_facts(config: Config, prompts: Prompts, reward: Callable[..., Reward]) -> None:
    """Raises UserError for a mode that reads what the reward does not say it finds."""
    from external import facts_read

    external = with_mode(config, prompts)
    wanted = facts_read(external, prompts, config.folder)
    given = getattr(reward, "facts", None)
    if config.section.num_turns == 1 or wanted is None:
        return
    if not (isinstance(given, type) and issubclass(given, wanted)):
        raise UserError(
            f"external.mode: '{external.mode}' reads a {wanted.__name__} in Score.facts, and the "
            f"class of reward.target '{config.reward.target}' does not say that it gives one; give "
            f"external.mode=plain, or name it there: facts = {wanted.__name__}"
        )


def sources(config: Config) -> tuple[Source, ...]:
    """The files of the user's own modules, by name."""
    found: dict[str, Source] = {}
    named = {"domain": config.domain, "reward.target": config.reward.target}
    for key, value in (named | {"external.mode": config.external.mode}).items():
        if value is not None and ":" in value:
            found |= {source.name: source for source in load(key, value, config.folder).sources}
    return tuple(found[name] for name in sorted(found))


def reward_reads(config: Config) -> set[str]:
    """What the reward is made with, keys of ``sandbox`` among it."""
    return set(_arguments(config, _reward(config)[0]))


def mode_reads(config: Config, prompts: Prompts) -> set[str]:
    """What the external mode is made with, keys of ``external`` among it. Raises UserError for
    a mode that there is not."""
    from external import settings_read

    return settings_read(with_mode(config, prompts), prompts, config.folder)


def sandbox_workers(workers: int | None) -> int:
    """This process's part of the machine's sandbox workers (None: its cores)."""
    from comlrl.processes import distributed

    whole = workers or len(os.sched_getaffinity(0))
    return max(1, whole // distributed.local_world_size())


def _domain_target(config: Config) -> Target:
    """A user's own domain, checked."""
    if ":" not in config.domain:
        hint = near(config.domain, BUILTIN, "there are {}")
        raise UserError(f"domain: '{config.domain}' is none; {hint} Or give module:NAME")
    target = load("domain", config.domain, config.folder)
    check_methods(target, Domain, NEEDED)
    for name in (*Domain.__annotations__, *METHODS):
        if not hasattr(target.found, name):
            hint = "name comlrl.types.Domain as the base of its class, which has it"
            inherits = hasattr(Domain, name)
            raise UserError(f"{target} has no `{name}`; {hint if inherits else 'add it'}")
    if isinstance(target.found, type):
        check_methods(target, Domain, METHODS, inherited=True)
        with target.calling():
            target = dataclasses.replace(target, found=target.found())
    check_methods(target, Domain, METHODS, inherited=True)
    _check_attributes(target)
    return target


def _check_attributes(target: Target) -> None:
    """What a domain has beside its methods."""
    fields, revision = target.found.fields, target.found.revision
    if not isinstance(fields, list | tuple) or not all(isinstance(name, str) for name in fields):
        raise UserError(f"{target}: its `fields` is {fields!r}; give a tuple of names")
    if not isinstance(revision, str):
        raise UserError(f"{target}: its `revision` is {revision!r}; give a text")
    if not callable(target.found.reward):
        raise UserError(f"{target}: its `reward` is {target.found.reward!r}; give a class")


def _reward(config: Config) -> tuple[Callable[..., Reward], Target | None]:
    """The class of the reward, and whose it is, if it is the user's own."""
    if config.reward.target is not None:
        target = load("reward.target", config.reward.target, config.folder)
        check_class(target, Reward, ["score"])
        check_methods(target, Reward, OPTIONAL, inherited=True)
        return target.found, target
    if ":" not in config.domain:
        return load_domain(config).reward, None
    own = _domain_target(config)
    cls = own.found.reward
    if isinstance(cls, type):
        reward = dataclasses.replace(own, value=f"{own.value}.reward", found=cls)
        check_methods(reward, Reward, ["score"])
        check_methods(reward, Reward, OPTIONAL, inherited=True)
    return cls, own


def _arguments(config: Config, cls: Callable[..., Reward]) -> dict[str, Any]:
    sandbox = config.sandbox
    offered = {f.name: getattr(sandbox, f.name) for f in dataclasses.fields(sandbox)}
    offered["workers"] = sandbox_workers(sandbox.workers)
    return keywords(cls, "reward.arguments", config.reward.arguments, offered, "sandbox")
