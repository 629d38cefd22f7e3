"""The work of a run: domain, prompts, reward and external mode, imported and checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl import external
from comlrl.config.plugins.arguments import keywords
from comlrl.config.plugins.modules import Source
from comlrl.config.plugins.targets import (
    FROM_PYTHON,
    Target,
    check_class,
    check_methods,
    load,
)
from comlrl.config.resolved import Config
from comlrl.config.sections import RoleSampling, SandboxConfig
from comlrl.errors import UserError, near, notice
from comlrl.processes.cores import available_cores
from comlrl.programs.loading import load_program
from comlrl.programs.program import Program
from comlrl.rewards.arena.games import ARENA
from comlrl.rollout.checked import METHODS, CheckedDomain, CheckedReward
from comlrl.tasks.prompts import PREFILL, REVISION, Prompts, check_templates
from comlrl.types import Domain, Reward

if TYPE_CHECKING:
    from comlrl.models.prompt_encoder import PromptEncoder

BUILTIN = ("code", "writing", *ARENA)
OPTIONAL = ("for_evaluation", "close")  # checked in a custom reward if present
NEEDED = ("task", "roles", "templates", "values", "problem")  # others have defaults in ``Domain``


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a run. Every command resolves it once and passes it on."""

    prompts: Prompts  # the domain's, with overrides from the ``prompts`` section
    domain_target: Target | None  # the source of a custom domain
    roles: tuple[str, ...]  # the roles of the run's agents
    reward: Callable[..., Reward]  # the reward's class
    reward_target: Target | None  # the source of a custom reward
    reward_arguments: Mapping[str, Any]  # arguments of the class, including ``sandbox`` settings
    rewards_each: bool  # whether the reward's class declares individual rewards of agents
    own_rewards: bool  # whether agents learn from individual rewards
    mode: external.Mode
    default_mode: str  # the meaning of ``external.mode: null``
    program: Program | None  # plays the tasks' episodes; None: agents act in turns
    sources: tuple[Source, ...]  # the files of the user's own modules, by name

    @property
    def domain(self) -> Domain:
        return self.prompts.domain

    def read_by(self, encoder_N: Sequence[PromptEncoder | None]) -> Work:
        """Return this work with prompts for the agents' encoders; None: a service plays it."""
        chats_N = [encoder is None or encoder.chats for encoder in encoder_N]
        thinks_N = [encoder is not None and encoder.opens_thought for encoder in encoder_N]
        services = [agent for agent, encoder in enumerate(encoder_N) if encoder is None]
        prompts = Prompts(self.domain, self.prompts.templates, chats_N, thinks_N, services)
        for agent, thinks in enumerate(thinks_N):
            if thinks and prompts.worded(agent).prefill and PREFILL not in prompts.templates:
                notice(
                    f"agent {agent}'s chat template opens a thought: its answers get no prefill; "
                    "prompts.prefill can close the thought and begin the answer"
                )
                break
        return dataclasses.replace(self, prompts=prompts)

    def build_reward(self) -> Reward:
        """Build the reward; its workers start lazily. Raises what its class raises."""
        if self.reward_target is None:
            return self.reward(**self.reward_arguments)
        with self.reward_target.calling():
            made = self.reward(**self.reward_arguments)
        return CheckedReward(made, self.reward_target, self.rewards_each)


def resolve_work(config: Config) -> Work:
    """Import and check the configured domain, reward and program, before anything heavy loads.

    Raises UserError if they cannot work.
    """
    domain, domain_target = _domain(config.domain, config.folder)
    section, own_reward = config.section, config.reward.target
    prompts, agents = Prompts(domain, config.prompts), section.num_agents
    key = f"{config.algorithm}.num_agents"
    program = load_program(config.program, agents, key, config.folder)
    roles = _roles(prompts, agents, key, program)
    if section.num_turns > 1 and not prompts.templates.get(REVISION, domain.revision):
        raise UserError(
            f"{config.algorithm}.num_turns: {section.num_turns}, and domain '{config.domain}' has "
            "no `revision`, with which feedback ends; add it to the domain, or set "
            "prompts.revision or num_turns=1"
        )
    if own_reward is None:
        reward, reward_target = _domain_reward(domain, domain_target)
    else:
        reward_target = load("reward.target", own_reward, config.folder)
        check_class(reward_target, Reward, ["score"])
        check_methods(reward_target, Reward, OPTIONAL, inherited=True)
        reward = reward_target.obj
    arguments = _arguments(reward, config.reward.arguments, config.sandbox, section.num_turns)
    if own_reward is None:
        try:
            domain.check_arguments(config.reward.arguments, agents)
        except ValueError as error:
            raise UserError(str(error)) from error
    # The domain's first mode may need facts that only its shipped reward reports.
    default = "plain" if own_reward is not None else next(iter(domain.modes()), "plain")
    settings = dataclasses.replace(config.external, mode=config.external.mode or default)
    mode = external.find(settings, domain, config.folder, domain_target)
    if section.num_turns > 1:
        _check_facts(mode, reward, own_reward)
    played = None if program is None else program.target
    targets = (domain_target, reward_target, mode.target, played)
    source_of = {source.name: source for target in targets if target for source in target.sources}
    rewards_each = bool(getattr(reward, "by_agent", False))
    own_rewards = rewards_each and config.reward.by_agent == "own"
    if own_rewards and section.one_reward:
        raise UserError(
            f"reward.by_agent: 'own', which {config.algorithm} cannot learn from: "
            f"{section.one_reward}; set reward.by_agent=mean"
        )
    return Work(
        prompts=prompts,
        domain_target=domain_target,
        roles=roles,
        reward=reward,
        reward_target=reward_target,
        reward_arguments=arguments,
        rewards_each=rewards_each,
        own_rewards=own_rewards,
        mode=mode,
        default_mode=default,
        program=program,
        sources=tuple(source_of[name] for name in sorted(source_of)),
    )


def _roles(prompts: Prompts, agents: int, key: str, program: Program | None) -> tuple[str, ...]:
    """Return the agents' roles; a program names its own and may ignore the domain's prompts.
    Raises UserError for a team size or templates that the domain does not support. ``key``: the
    setting that determines the number of ``agents``."""
    try:
        roles = prompts.domain.roles(agents)
    except ValueError as error:
        if program is not None:
            return program.names_N
        raise UserError(f"{key}: {agents}; {error}") from error
    check_templates(prompts, roles, agents)
    return tuple(roles) if program is None else program.names_N


def check_baseline(
    name: str, num_agents: int, sampling: Mapping[str, RoleSampling], domain: Domain
) -> None:
    """Raise UserError if the domain does not support the baseline's team. Baselines use the
    domain's prompts and roles, even if the run has a program."""
    size = 1 if name == "single" else num_agents
    try:
        roles = domain.roles(size)
    except ValueError as error:
        least = "" if name == "single" else ", or another num_agents"
        raise UserError(
            f"--baseline: '{name}' has a team of {size}, but {error}; choose another "
            f"baseline{least}"
        ) from error
    if unused := [role for role in sampling if role not in roles]:
        notice(f"sampling of {unused[0]}: not used, no agent of --baseline {name} has this role")


def sandbox_workers(workers: int | None) -> int:
    """Return this process's share of the machine's sandbox workers (None: its cores)."""
    from comlrl.processes import distributed

    machine_workers = workers or available_cores()
    return max(1, machine_workers // distributed.local_world_size())


def _check_facts(
    mode: external.Mode, reward: Callable[..., Reward], reward_name: str | None
) -> None:
    """Raise UserError for a mode that needs facts that the reward does not report."""
    wanted, facts = mode.facts_read, getattr(reward, "facts", None)
    if wanted is not None and not (isinstance(facts, type) and issubclass(facts, wanted)):
        raise UserError(
            f"external.mode: '{mode.name}' reads a {wanted.__name__} in Score.facts, and the class "
            f"of reward.target '{reward_name}' does not declare it; set external.mode=plain, or "
            f"declare it there: facts = {wanted.__name__}"
        )


def _domain(name: str, folder: Path) -> tuple[Domain, Target | None]:
    """Return the object that ``domain`` names, and its target if it is a custom domain."""
    if name == "code":
        from comlrl.rewards.code.domain import CODE

        return CODE, None
    if name == "writing":
        from comlrl.rewards.writing.writing_domain import WRITING

        return WRITING, None
    if name in ARENA:
        return ARENA[name], None
    target = _domain_target(name, folder)
    return CheckedDomain(target.obj, target), target


def _domain_target(name: str, folder: Path) -> Target:
    """Load and check a custom domain."""
    if ":" not in name and name != FROM_PYTHON:
        hint = near(name, BUILTIN, "choose from {}, or use module:NAME")
        raise UserError(f"domain: unknown domain '{name}'; {hint}")
    target = load("domain", name, folder)
    check_methods(target, Domain, NEEDED)
    for member in (*Domain.__annotations__, *METHODS):
        if not hasattr(target.obj, member):
            hint = "derive its class from comlrl.types.Domain"
            inherits = hasattr(Domain, member)
            raise UserError(f"{target} has no `{member}`; {hint if inherits else 'add it'}")
    if isinstance(target.obj, type):
        check_methods(target, Domain, METHODS, inherited=True)
        with target.calling():
            target = dataclasses.replace(target, obj=target.obj())
    check_methods(target, Domain, METHODS, inherited=True)
    _check_attributes(target)
    return target


def _check_attributes(target: Target) -> None:
    """Check the attributes of a domain that are not methods."""
    fields = target.obj.fields
    if not isinstance(fields, list | tuple) or not all(isinstance(name, str) for name in fields):
        raise UserError(f"{target}: its `fields` is {fields!r}; use a tuple of names")
    for name in (REVISION, PREFILL):
        if not isinstance(text := getattr(target.obj, name), str):
            raise UserError(f"{target}: its `{name}` is {text!r}; use a text")
    if not callable(target.obj.reward):
        raise UserError(f"{target}: its `reward` is {target.obj.reward!r}; use a class")


def _domain_reward(
    domain: Domain, domain_target: Target | None
) -> tuple[Callable[..., Reward], Target | None]:
    """Return the class of a domain's reward, and its target if the domain is a custom one."""
    if domain_target is None:
        return domain.reward, None
    cls = domain_target.obj.reward
    if isinstance(cls, type):
        value = f"{domain_target.value}.reward"
        reward = dataclasses.replace(domain_target, value=value, obj=cls)
        check_methods(reward, Reward, ["score"])
        check_methods(reward, Reward, OPTIONAL, inherited=True)
    return cls, domain_target


def _arguments(
    cls: Callable[..., Reward], arguments: Mapping[str, Any], sandbox: SandboxConfig, num_turns: int
) -> dict[str, Any]:
    offered = {f.name: getattr(sandbox, f.name) for f in dataclasses.fields(sandbox)}
    offered["workers"] = sandbox_workers(sandbox.workers)
    if "num_turns" not in arguments:
        offered["num_turns"] = num_turns
    return keywords(cls, "reward.arguments", arguments, offered, "sandbox")
