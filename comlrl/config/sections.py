"""Configuration: one frozen, typed object of all keys (read from YAML by ``loader.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """A mistake of the user's; its one line names the key, the value and the mend."""


@dataclass(frozen=True)
class AgentModelConfig:
    """The base model of homogeneous agents, and how every agent samples."""

    # that, builtin:tiny-coder-long, a hub name, a local folder, or a .gguf file (with pip install
    # 'comlrl[gguf]'; its weights are unpacked)
    name: str = "builtin:tiny-coder"
    # auto: bfloat16 on GPUs that have it and on CPUs that are faster in it (with AMX, or AMD's with
    # AVX-512 bfloat16); else float32. Trained weights have float32 masters in the optimizer
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    # which of transformers' attention kernels; auto: sdpa, and eager for models that sdpa does not
    # serve (Gemma 2, which caps its scores)
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    tokenizer_kwargs: dict[str, Any] = field(default_factory=dict)  # to AutoTokenizer
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # to AutoModelForCausalLM
    special_tokens: dict[str, str] = field(default_factory=dict)  # pad_token, eos_token, …
    temperature: float = 1.0  # used where the algorithm's section leaves it null
    top_p: float | None = None  # nucleus; null: no truncation
    top_k: int | None = None  # null: no truncation
    max_length: int = 2048  # tokens of prompt and completion together
    gradient_checkpointing: bool = False  # less memory in the update, about a third slower


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters on one shared frozen base; off: each agent trains all weights of a copy."""

    enabled: bool = True  # false: all weights are trained
    r: int = 16  # rank of the adapters
    alpha: float | None = None  # null: 2 r
    dropout: float = 0.0  # of the adapters; 0 for PPO and SHPPO
    target_modules: Any = "all-linear"  # "all-linear" or a list of module names


@dataclass(frozen=True)
class DatasetConfig:
    """Where the problems come from: rows with the columns that the domain reads."""

    # builtin:coopmini, builtin:coopmini-long, builtin:posts (writing), a hub name, a folder, or
    # .jsonl/.json/.parquet
    name: str = "builtin:coopmini"
    type: str | None = None  # a short name for the run directory; null: from the name
    train_split: str = "train"  # e.g. train, test[33:163]
    eval_split: str = "eval"  # held-out tasks, sliced alike
    on_bad_row: Literal["error", "skip"] = "error"  # skip: leave it out and say so

    @property
    def short_name(self) -> str:
        """``type``, or what the name ends with."""
        return self.type or Path(self.name.replace(":", "/")).stem


@dataclass(frozen=True)
class OutputConfig:
    """What a run leaves behind."""

    base_dir: str = "outputs"  # parent of run directories that have no name of their own
    dir: str | None = None  # null: base_dir/<algorithm>_<dataset type>_<seed>
    # final_model/agent_N/, with a model card; auto: adapters and SHPPO's networks, which are small
    save_final_model: Literal["auto", True, False] = "auto"
    save_best: bool = False  # best_model/: as at the evaluation with the highest reward
    overwrite: bool = False  # where `dir` holds a run: move all of it aside, to <dir>.1
    verbose: bool = False  # every episode to episodes.jsonl


@dataclass(frozen=True)
class ExternalConfig:
    """What agents are told between turns."""

    # what agents read before a revision (docs/external.md): plain, expert_edits, a mode of the
    # domain's (code: level_feedback, level_passed, passed) or module:Class; null: the domain's
    # first; plain where it has none, or with a reward.target
    mode: str | None = None
    sandbox_slice: int | str | None = 1  # tests that feedback may show; 0, null, all: every
    expert_model: str = "deepseek-coder"  # of mode expert_edits
    expert_base_url: str | None = None  # null: the provider's of the model's name
    # where the expert fails; plain: ask for a revision without it
    on_error: Literal["stop", "plain"] = "stop"
    history: Literal["full", "last"] = "full"  # the whole conversation, or the newest attempt
    original_prompt: bool = False  # history: last only
    previous_response: bool = True  # history: last only


@dataclass(frozen=True)
class SandboxConfig:
    """How what models write is run, where the domain runs it."""

    # what shuts a program in: docs/sandbox.md
    isolation: Literal["auto", "namespaces", "bubblewrap", "unshare", "limits"] = "auto"
    workers: int | None = None  # null: the CPU cores
    # wall-clock seconds for each test; all tests of a program have three times that together
    timeout: float = 10.0
    memory_mb: int = 512  # of a program


@dataclass(frozen=True)
class RewardConfig:
    """What a joint action earns."""

    # module:Class of another reward for the same work (docs/cookbook.md); null: the domain's own
    target: str | None = None
    # by name, of that class; code's are in docs/reward.md
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardProcessorConfig:
    """Training reward = scale_factor · reward + shift, where enabled."""

    enabled: bool = True  # false: training reward = reward
    scale_factor: float = 1.0  # multiplies the reward
    shift: float = 0.0  # is added after that


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; no section: off."""

    project: str = "comlrl"  # where the run is shown
    entity: str | None = None  # user or team; null: the login's
    name: str | None = None  # null: that of the run directory
    dir: str | None = None  # of W&B's own files; null: the run directory
    tags: list[str] = field(default_factory=list)  # shown with the run
    # null: online where there is a login
    mode: Literal["online", "offline", "disabled"] | None = None


@dataclass(frozen=True)
class GenerationConfig:
    """What samples completions in training; evaluate.py always takes the builtin."""

    backend: Literal["builtin", "vllm"] = "builtin"  # vllm: a server (docs/scaling.md)
    max_batch_tokens: int = 262144  # builtin: key/value slots held at once; more is split
    # where top_p or top_k truncate: tokens of a position's set that are kept to learn over it; of a
    # larger set a threshold is (docs/concepts.md)
    max_kept: int = 256
    vllm_url: str | None = None  # of the server, e.g. http://localhost:8000
    vllm_patience: float = 300.0  # seconds without an answer after which a run saves and stops
    # of π/μ, trained policy over server's, by which a completion's gradient is multiplied
    importance_cap: float = 2.0
    # vllm: 1: a step's first turn is sampled while the step before it updates, by the policies from
    # before that update
    overlap: Literal[0, 1] = 0


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes under torchrun."""

    strategy: Literal["replicate", "fsdp"] = "replicate"  # a copy on each process, or shards


@dataclass(frozen=True)
class RoleSampling:
    """One agent's sampling; null: as the algorithm's section says."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Config:
    """The resolved configuration of one run."""

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
    reward_processor: RewardProcessorConfig
    wandb: WandbConfig | None
    generation: GenerationConfig
    distributed: DistributedConfig
    agent_devices: tuple[str, ...] | None
    sampling: Mapping[str, RoleSampling]  # by role, of agents that sample otherwise than the rest
    sections: Mapping[str, Any]  # the algorithm's section, and MARLHF's RL algorithm's
    # of the file: modules of its own lie there
    folder: Path = field(default_factory=Path.cwd, compare=False)
    # of the file that was read: its paths are looked for there first
    beside: Path = field(default_factory=Path.cwd, compare=False)

    @property
    def section(self) -> Any:
        """The algorithm's own section."""
        return self.sections[self.algorithm]

    @property
    def keeps_final_model(self) -> bool:
        """Whether the run ends with ``final_model/``: adapters unless told not to be."""
        asked = self.output.save_final_model
        return self.lora.enabled if asked == "auto" else asked

    def to_dict(self) -> dict[str, Any]:
        """What ``config.yaml`` holds: read back, it gives this object again."""
        plain = {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("algorithm", "sections", "folder", "beside")
        }
        return plain | {name: _plain(section) for name, section in self.sections.items()}


SECTIONS: dict[str, type] = {
    "agent_model": AgentModelConfig,
    "lora": LoraSection,
    "dataset": DatasetConfig,
    "output": OutputConfig,
    "external": ExternalConfig,
    "sandbox": SandboxConfig,
    "reward": RewardConfig,
    "reward_processor": RewardProcessorConfig,
    "wandb": WandbConfig,
    "generation": GenerationConfig,
    "distributed": DistributedConfig,
}


@dataclass
class Root:
    """Keys that stand at the top of a file, outside any section."""

    seed: int = 42  # of everything that is drawn at random
    domain: str = "code"  # what the team works on: code, writing, or module:NAME
    # templates in the place of the domain's, by role; also system, and revision: what feedback
    # ends with
    prompts: dict[str, str] = field(default_factory=dict)
    # by role: max_new_tokens, temperature, top_p and top_k of that agent alone; left out: those of
    # the algorithm's section
    sampling: dict[str, Any] = field(default_factory=dict)
    # a run (of any algorithm), its best_model, …, or adapters in PEFT's format to start from
    init_from: str | None = None
    agents: list[str] | None = None  # one model for each agent, instead of adapters on agent_model
    agent_devices: list[str] | None = None  # where each of `agents` is, e.g. [cuda:0, cuda:1]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
