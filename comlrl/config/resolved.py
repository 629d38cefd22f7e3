"""``Config``: the resolved configuration of one run, frozen and typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comlrl.config.algorithms import CommonConfig, MAGRPOConfig
from comlrl.config.sections import (
    AgentModelConfig,
    DatasetConfig,
    DistributedConfig,
    ExternalConfig,
    GenerationConfig,
    LoraSection,
    MlflowConfig,
    OutputConfig,
    ProgramConfig,
    RewardConfig,
    RewardProcessorConfig,
    RoleSampling,
    SandboxConfig,
    TrackioConfig,
    WandbConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All that a run is configured by, and what several places work out of it."""

    algorithm: str
    domain: str
    prompts: Mapping[str, str]
    agent_model: AgentModelConfig
    agents: tuple[str, ...] | None  # one model name for each agent: separate models
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
    mlflow: MlflowConfig | None
    trackio: TrackioConfig | None
    generation: GenerationConfig
    distributed: DistributedConfig
    agent_devices: tuple[str, ...] | None
    sampling: Mapping[str, RoleSampling]  # by role, of agents that sample otherwise than the rest
    # the algorithm's section, and that of the algorithm that MARLHF learns by online
    sections: Mapping[str, CommonConfig]
    # of the file: the user's modules are looked for there
    folder: Path = field(default_factory=Path.cwd, compare=False)
    # of the file that was read: its paths are looked for there first
    beside: Path = field(default_factory=Path.cwd, compare=False)

    @property
    def section(self) -> CommonConfig:
        """The algorithm's own section."""
        return self.sections[self.algorithm]

    @property
    def online_name(self) -> str:
        """The name of the section that the online loop is built from."""
        return self.section.learns_by or self.algorithm

    @property
    def online(self) -> CommonConfig:
        """The section that trains online: the algorithm's own, or that of MARLHF's second stage."""
        section, advantage = self.sections[self.online_name], self.section.online_advantage
        if advantage is None:
            return section
        assert isinstance(section, MAGRPOConfig)
        return replace(section, advantage=advantage)

    @property
    def shares_base(self) -> bool:
        """Whether all agents are adapters on one frozen base."""
        return self.agents is None and self.lora.enabled

    @property
    def agent_models(self) -> tuple[str, ...]:
        """The model of each agent."""
        return self.agents or (self.agent_model.name,) * self.section.num_agents

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model of each policy that is trained."""
        return self.agents or (self.agent_model.name,) * self.section.policies

    @property
    def keeps_final_model(self) -> bool:
        """Whether the run ends with ``final_model/``: adapters do, unless switched off."""
        asked = self.output.save_final_model
        return self.lora.enabled if asked == "auto" else asked

    def temperature(self, section: CommonConfig) -> float:
        """A section's temperature, or agent_model's where it says null."""
        given = section.temperature
        return self.agent_model.temperature if given is None else given

    def top_p(self, section: CommonConfig) -> float | None:
        """A section's nucleus mass, or agent_model's where it says null."""
        return self.agent_model.top_p if section.top_p is None else section.top_p

    def top_k(self, section: CommonConfig) -> int | None:
        """A section's top-k, or agent_model's where it says null."""
        return self.agent_model.top_k if section.top_k is None else section.top_k

    def to_dict(self) -> dict[str, Any]:
        """What ``config.yaml`` holds: read back, it gives this object again."""
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
