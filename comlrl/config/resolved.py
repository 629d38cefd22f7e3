"""``Config``, the resolved configuration of one run, and the base of all algorithm sections.

Both are frozen and typed, and check themselves; a section's check receives the whole ``Config``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from comlrl.config.algorithms_common import Advantage, CommonKeys
from comlrl.config.keys import keys_of, out_of_range
from comlrl.config.sections import (
    SECTIONS as SHARED,
)
from comlrl.config.sections import (
    AgentConfig,
    AgentModelConfig,
    DatasetConfig,
    DistributedConfig,
    EvaluationConfig,
    ExternalConfig,
    GenerationConfig,
    LoraSection,
    OutputConfig,
    ProgramConfig,
    RewardConfig,
    RewardProcessorConfig,
    RoleSampling,
    SandboxConfig,
    TrackioConfig,
    WandbConfig,
)
from comlrl.errors import UserError, near


class Rounds(NamedTuple):
    """The candidate sampling of an algorithm that learns from preferences."""

    number: int
    tasks: int | None  # per round; None: all, divided among the rounds
    candidates: int  # per agent and task
    pairs: int | None  # maximum per task; None: all
    preferences: str | None  # file from which preferences are read instead


class Networks(NamedTuple):
    """Settings of the networks that distinguish agents of one policy, named like their keys."""

    latent_dim: int
    latent_hidden: int
    heterogeneous_rank: int
    latents: Literal["learned", "zero", "sampled"]


@dataclass(frozen=True, kw_only=True)
class CommonConfig(CommonKeys):
    """Keys that every algorithm section has, and what the rest of the program asks of them."""

    @property
    def learns_by(self) -> str | None:
        """Return the section of the algorithm that runs the online stage; None: this one."""
        return None

    @property
    def online_advantage(self) -> Advantage | None:
        """Return the advantage that replaces the one in the section of ``learns_by``; None:
        unchanged."""
        return None

    @property
    def needs_reference(self) -> bool:
        """Return whether training evaluates the initial policy."""
        return self.kl_coef > 0

    def leniency(self, progress: float) -> float:
        """Return the weight λ of a completion's best joint action, against the mean, in its credit
        at a progress from 0 to 1."""
        return 0.0

    @property
    def takes_ratios(self) -> bool:
        """Return whether the loss uses importance ratios."""
        return False

    @property
    def passes(self) -> int:
        """Return the number of passes of the update over a step's samples."""
        return 1

    @property
    def baseline(self) -> Advantage | None:
        """Return the baseline of returns; None: a critic's values, or returns are not used."""
        return None

    @property
    def samples_greedily(self) -> bool:
        """Return whether returns are compared with those of greedy rollouts."""
        return self.baseline == "greedy"

    @property
    def one_policy(self) -> bool:
        """Return whether all agents act by one policy, so that their number may change."""
        return self.heterogeneous

    @property
    def policies(self) -> int:
        """Return the number of trained policies: one for each agent, or one for all."""
        return 1 if self.one_policy else self.num_agents

    @property
    def rounds(self) -> Rounds | None:
        """Return the settings of candidates and pairs; None without preferences."""
        return None

    @property
    def networks(self) -> Networks | None:
        """Return the networks that distinguish agents of one policy; None if there are none."""
        return None

    @property
    def critics(self) -> int:
        """Return the number of trained critics."""
        return 0

    @property
    def fitted_reward_model(self) -> Literal["head", "all"] | None:
        """Return which weights of a reward model the run trains; None: it trains no reward
        model."""
        return None

    @property
    def other_models(self) -> Mapping[str, str]:
        """Return the language models other than the agents', by the key that names them."""
        return {}

    @property
    def inputs(self) -> Mapping[str, str]:
        """Return the files and folders of earlier runs, by the key that names them."""
        return {}

    def with_advantage(self, advantage: Advantage | None) -> CommonConfig:
        """Return the section with this advantage, or unchanged for None."""
        return self

    def problems(self, name: str, config: Config) -> Iterator[str]:
        """Yield an error line for each invalid combination of keys, the worst first.

        Args:
            name: the section's name in ``config``, the prefix of its keys.
        """
        weights = self.turn_gradient_weights
        if weights is not None and len(weights) != self.num_turns:
            yield (
                f"{name}.turn_gradient_weights: {list(weights)} lists {len(weights)} weights for "
                f"{name}.num_turns={self.num_turns}; list one for each turn"
            )
        if weights is not None and min(weights, default=0) < 0:
            yield (
                f"{name}.turn_gradient_weights: {list(weights)}; weights below 0 "
                "would reverse the learning of a turn: use 0 or more"
            )
        if self.num_train_epochs is None and self.max_steps is None and self.max_env_steps is None:
            yield (
                f"{name}.num_train_epochs: null, as are max_steps and max_env_steps; set one of "
                "them"
            )
        if self.turn_order == "sequential" and self.joint_mode != "align":
            yield (
                f"{name}.joint_mode: '{self.joint_mode}' with turn_order=sequential, where every "
                "agent already answers each completion that it reads: use align"
            )
        most = self.shape.turn_joint_actions
        if self.handoff is not None and self.handoff_width > most:
            yield (
                f"{name}.handoff_width: {self.handoff_width} of a turn's {most} joint actions; use "
                f"at most {most}, or handoff=null, which continues all of them"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The complete configuration of a run, and values derived from it."""

    algorithm: str
    domain: str
    prompts: Mapping[str, str]
    agent_model: AgentModelConfig
    # a tuple of model names, one per agent: separate models; or settings of single agents, by role
    agents: tuple[str, ...] | Mapping[str, AgentConfig] | None
    lora: LoraSection
    dataset: DatasetConfig
    seed: int
    init_from: str | None
    output: OutputConfig
    external: ExternalConfig
    sandbox: SandboxConfig
    reward: RewardConfig
    program: ProgramConfig
    reward_processor: RewardProcessorConfig
    wandb: WandbConfig | None
    trackio: TrackioConfig | None
    generation: GenerationConfig
    distributed: DistributedConfig
    evaluation: EvaluationConfig
    agent_devices: tuple[str, ...] | None
    sampling: Mapping[str, RoleSampling]  # settings of single agents, by role
    # the algorithm's section; with MARLHF also that of its online algorithm
    sections: Mapping[str, CommonConfig]
    # folder in which the user's modules are looked up
    folder: Path = field(default_factory=Path.cwd, compare=False)
    # folder of the file that was read; its paths are resolved here first
    beside: Path = field(default_factory=Path.cwd, compare=False)

    @property
    def section(self) -> CommonConfig:
        """Return the section of the run's algorithm."""
        return self.sections[self.algorithm]

    @property
    def online_name(self) -> str:
        """Return the name of the section that configures the online loop."""
        return self.section.learns_by or self.algorithm

    @property
    def online(self) -> CommonConfig:
        """Return the section of online training: the algorithm's, or that of MARLHF's online
        stage."""
        return self.sections[self.online_name].with_advantage(self.section.online_advantage)

    @property
    def other_models(self) -> Mapping[str, str]:
        """Return the language models other than the agents', by dotted key."""
        read = {self.algorithm: self.section, self.online_name: self.online}
        return {f"{n}.{key}": m for n, s in read.items() for key, m in s.other_models.items()}

    @property
    def agents_models(self) -> list[tuple[str, str]]:
        """Return (key, name) of the agents' models."""
        if isinstance(self.agents, tuple):
            return [("agents", name) for name in self.agents]
        entries = (self.agents or {}).items()
        named = [(f"agents.{role}.model", agent.model) for role, agent in entries if agent.model]
        if self.agent_model.name in self.agent_models:
            named.append(("agent_model.name", self.agent_model.name))
        return named

    @property
    def named_models(self) -> list[tuple[str, str]]:
        """Return (key, name) of every model that a run loads, the agents' first."""
        return [*self.agents_models, *self.other_models.items()]

    @property
    def shares_base(self) -> bool:
        """Return whether all agents are adapters on one frozen base."""
        apart = isinstance(self.agents, tuple) or len(set(self.agent_models)) > 1
        return self.lora.enabled and not apart and all(a == self.loras[0] for a in self.loras)

    @property
    def team(self) -> tuple[AgentConfig, ...]:
        """Return the settings of each agent, with its model filled in, for any form of
        ``agents``."""
        agents = [AgentConfig()] * self.section.num_agents
        if isinstance(self.agents, tuple):
            agents = [AgentConfig(model=name) for name in self.agents]
        elif self.agents is not None and not self.section.one_policy:
            agents = list(self.agents.values())  # complete and in order after ``with_roles``
        names = [a.model or self.agent_model.name for a in agents]
        # An agent played by a service gets a local agent's model, which costs no extra memory.
        local = next((n for n, a in zip(names, agents, strict=True) if a.api is None), names[0])
        return tuple(
            replace(a, model=local if a.api else n) for n, a in zip(names, agents, strict=True)
        )

    @property
    def loras(self) -> tuple[LoraSection, ...]:
        """Return the adapter settings of each agent."""
        changes = [{} if agent.lora is None else asdict(agent.lora) for agent in self.team]
        return tuple(
            replace(self.lora, **{k: value for k, value in of_agent.items() if value is not None})
            for of_agent in changes
        )

    @property
    def agent_models(self) -> tuple[str, ...]:
        """Return the model of each agent."""
        return tuple(str(agent.model) for agent in self.team)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the model of each policy."""
        return self.agent_models[: self.section.policies]

    @property
    def role_sampling(self) -> Mapping[str, RoleSampling]:
        """Return the sampling settings of agents that differ from the others, by role."""
        entries = self.agents.items() if isinstance(self.agents, Mapping) else ()
        return {**self.sampling, **{role: a.sampling for role, a in entries if a.sampling}}

    def with_roles(self, roles: Sequence[str]) -> Config:
        """Return the configuration with an entry of ``agents`` for every role, in order.

        Raises UserError for an unknown role.
        """
        if not isinstance(self.agents, Mapping):
            return self
        for role in self.agents:
            if role not in roles:
                raise UserError(
                    f"agents.{role}: no agent has this role; {near(role, roles, 'there are {}')}"
                )
        if self.section.one_policy:
            return self
        return replace(self, agents={role: self.agents.get(role, AgentConfig()) for role in roles})

    @property
    def keeps_final_model(self) -> bool:
        """Return whether the run writes ``final_model/``; by default only adapters are saved."""
        setting = self.output.save_final_model
        return self.lora.enabled if setting == "auto" else setting

    @property
    def no_weights(self) -> str | None:
        """Return why the run will store no weights for evaluation or further training; None: it
        will store weights."""
        section = self.section
        saves = section.eval_interval if section.save_steps is None else section.save_steps
        if self.keeps_final_model or self.output.save_best or saves:
            return None
        why = "output.save_final_model=false"
        if self.output.save_final_model == "auto":
            why = "output.save_final_model=auto saves adapters, and lora.enabled=false trains none"
        return f"this run leaves no weights: {why}; set output.save_final_model=true to save them"

    @property
    def _completion_limits(self) -> list[int]:
        """Return each role's ``max_new_tokens``, and the algorithm's if a role has none."""
        limits = [settings.max_new_tokens for settings in self.role_sampling.values()]
        used = [limit for limit in limits if limit is not None]
        if len(used) < self.section.num_agents:
            used.append(self.section.max_new_tokens)
        return used

    def context_length(self, holds: int) -> int:
        """Return the limit of prompt and completion tokens together: max_length, or ``holds``, the
        models' limit, if that is less.

        Raises UserError if that leaves no room for a prompt.
        """
        written = max(*self._completion_limits, self.evaluation.max_new_tokens or 0, 0)
        if holds <= written:
            raise UserError(
                f"{self.algorithm}.max_new_tokens: {written} leaves no room for a prompt in the "
                f"model's context of {holds} tokens; lower it"
            )
        return min(self.agent_model.max_length, holds)

    @property
    def shift(self) -> float:
        """Return the constant that ``reward_processor`` adds to every reward."""
        return self.reward_processor.shift if self.reward_processor.enabled else 0.0

    def check(self) -> None:
        """Raise UserError for the first value out of range or invalid combination of keys."""
        for problem in self.problems():
            raise UserError(problem)

    def problems(self) -> Iterator[str]:
        """Yield an error line for each value out of range and each invalid combination of keys."""
        sections = {name: self.sections[name] for name in (self.algorithm, self.online_name)}
        for name in SHARED:
            if (shared := getattr(self, name)) is not None:
                yield from out_of_range(name, shared)
        for name, section in sections.items():
            yield from out_of_range(name, section)
        for name, section in sections.items():
            yield from section.problems(name, self)
        team = self.section.num_agents
        for name, entries in (("agents", self.agents), ("agent_devices", self.agent_devices)):
            if isinstance(entries, tuple) and len(entries) != team:
                yield (
                    f"{name}: {list(entries)} lists {len(entries)} entries for "
                    f"{self.algorithm}.num_agents={team}; list one for each agent"
                )
        yield from self._agent_problems()
        yield from self._program_problems()
        if self.online.takes_ratios and self.lora.dropout > 0:
            yield (
                f"lora.dropout: {self.lora.dropout} would be part of the importance ratio, which "
                "compares the policy with the sampling policy; set lora.dropout=0"
            )
        if self.output.overwrite and self.output.dir is None:
            yield (
                "output.overwrite: true, where folders under output.base_dir are numbered; set "
                "output.dir, or leave overwrite out"
            )
        if self.output.save_best and not self.section.eval_interval:
            yield (
                f"output.save_best: true, and {self.algorithm}.eval_interval=0 evaluates nothing; "
                "set it above 0"
            )
        common = self.section.max_new_tokens
        if self.agent_model.max_length <= common and common in self._completion_limits:
            yield (
                f"agent_model.max_length: {self.agent_model.max_length} leaves no room for a "
                f"prompt before {self.algorithm}.max_new_tokens={common}"
            )

    def _agent_problems(self) -> Iterator[str]:
        agents = self.agents if isinstance(self.agents, Mapping) else {}
        for role, agent in agents.items():
            key = f"agents.{role}"
            yield from out_of_range(key, agent)
            if agent.sampling and role in self.sampling:
                yield f"{key}.sampling: {role} is in `sampling` too; remove one of them"
            alike = replace(AgentConfig(), sampling=agent.sampling)
            different = [
                f.name
                for f in dataclasses.fields(agent)
                if getattr(agent, f.name) != getattr(alike, f.name)
            ]
            if self.section.one_policy and different:
                yield (
                    f"{key}.{different[0]}: {getattr(agent, different[0])!r} with "
                    f"{self.algorithm}, whose agents act by one policy; leave it out, or set it "
                    "for all of them in the common sections"
                )
            if agent.lora is not None:
                yield from out_of_range(f"{key}.lora", agent.lora)
                if not self.lora.enabled:
                    yield f"{key}.lora: with lora.enabled=false there is no adapter; leave it out"
            if agent.api is not None:
                yield from self._api_problems(key, agent)
            if not agent.train and agent.learning_rate is not None:
                yield (
                    f"{key}.learning_rate: {agent.learning_rate}, and {key}.train=false: its "
                    "weights stay as they are; leave one of them out"
                )
        if sum(not agent.train for agent in agents.values()) >= self.section.num_agents:
            yield (
                f"agents.{next(iter(agents))}.train: false, as of all agents, so that nothing is "
                "trained; leave it out for one of them"
            )

    def _program_problems(self) -> Iterator[str]:
        """Yield an error line for each setting that is invalid with a program."""
        program, name, section = self.program, self.algorithm, self.section
        if not program.replaces_turns:
            return
        key = "program.target" if program.target is not None else "program.command"
        if section.no_programs:
            yield (
                f"{key}: '{program.target or program.command}' with {name}, which cannot learn "
                f"from a program: {section.no_programs}; train with magrpo, grpo or ppo, or set "
                f"{key}=null"
            )
        for turns in ("num_turns", "joint_mode", "turn_order", "handoff", "turn_gradient_weights"):
            value = getattr(section, turns)
            if value != keys_of(type(section))[turns].default:
                yield (
                    f"{name}.{turns}: {value!r} with {key}, which decides who acts when; leave it "
                    f"out, or set {key}=null"
                )
        if self.generation.overlap:
            yield (
                f"generation.overlap: 1 with {key}, which is not played while a step updates; set "
                "it to 0"
            )

    def _api_problems(self, key: str, agent: AgentConfig) -> Iterator[str]:
        """Yield an error line for each setting that is invalid if a service plays an agent."""
        yield from out_of_range(f"{key}.api", agent.api)
        for name in ("base_url", "model"):
            if getattr(agent.api, name) is None:
                yield f"{key}.api.{name}: null; set the service's"
        for name in ("model", "lora", "template_arguments"):
            if value := getattr(agent, name):
                yield (
                    f"{key}.{name}: {value!r} with {key}.api, whose model is not here; leave it out"
                )
        centralized = getattr(self.online, "critic", None) == "centralized"
        if self.generation.backend == "vllm":
            yield f"generation.backend: vllm, whose servers do not play {key}.api; use builtin"
        if self.distributed.strategy == "fsdp":
            yield (
                f"distributed.strategy: fsdp with {key}.api, which every process would ask; use "
                "replicate"
            )
        if centralized:
            yield (
                f"{self.online_name}.critic: centralized reads the tokens of every agent's prompt, "
                f"and {key}.api returns none; use independent"
            )
        if self.section.rounds is not None:
            yield (
                f"{key}.api: with {self.algorithm}, which learns from preferences between "
                "completions of all agents; train with magrpo, grpo or ppo"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.yaml``; loading it returns an equal object."""
        plain = {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("algorithm", "sections", "folder", "beside")
        }
        return plain | {name: _plain(section) for name, section in self.sections.items()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
