"""The sections that every algorithm has, and the keys at the top of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from comlrl.config.keys import key


@dataclass(frozen=True)
class AgentModelConfig:
    """The base model of homogeneous agents, and how every agent samples."""

    name: str = key(
        "builtin:tiny-coder",
        "that, builtin:tiny-coder-long, a hub name, a local folder, or a .gguf file (with pip"
        " install 'comlrl[gguf]'; its weights are unpacked)",
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key(
        "auto",
        "auto: bfloat16 on GPUs that have it and on CPUs that are faster in it (with AMX, or "
        "AMD's with AVX-512 bfloat16); else float32. Trained weights have float32 masters in "
        "the optimizer",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto",
        "which of transformers' attention kernels; auto: sdpa, and eager for models that sdpa"
        " does not serve (Gemma 2, which caps its scores)",
    )
    tokenizer_kwargs: dict[str, Any] = key({}, "to AutoTokenizer")
    model_kwargs: dict[str, Any] = key({}, "to AutoModelForCausalLM")
    special_tokens: dict[str, str] = key({}, "pad_token, eos_token, …")
    temperature: float = key(1.0, "used where the algorithm's section leaves it null", above=0)
    top_p: float | None = key(None, "nucleus; null: no truncation", above=0, at_most=1)
    top_k: int | None = key(None, "null: no truncation", at_least=1)
    max_length: int = key(2048, "tokens of prompt and completion together")
    gradient_checkpointing: bool = key(False, "less memory in the update, about a third slower")


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters on one shared frozen base; off: each agent trains all weights of a copy."""

    enabled: bool = key(True, "false: all weights are trained")
    r: int = key(16, "rank of the adapters", at_least=1)
    alpha: float | None = key(None, "null: 2 r", above=0)
    dropout: float = key(0.0, "of the adapters; 0 for PPO and SHPPO", at_least=0, below=1)
    target_modules: Any = key("all-linear", '"all-linear" or a list of module names')


@dataclass(frozen=True)
class DatasetConfig:
    """Where the problems come from: rows with the columns that the domain reads."""

    name: str = key(
        "builtin:coopmini",
        "builtin:coopmini, builtin:coopmini-long, builtin:posts (writing), a hub name, a "
        "folder, or .jsonl/.json/.parquet",
    )
    type: str | None = key(None, "a short name for the run directory; null: from the name")
    train_split: str = key("train", "e.g. train, test[33:163]")
    eval_split: str = key("eval", "held-out tasks, sliced alike")
    on_bad_row: Literal["error", "skip"] = key("error", "skip: leave it out and say so")

    @property
    def short_name(self) -> str:
        """``type``, or what the name ends with."""
        return self.type or Path(self.name.replace(":", "/")).stem


@dataclass(frozen=True)
class OutputConfig:
    """What a run writes."""

    base_dir: str = key("outputs", "parent of run directories when output.dir is null")
    dir: str | None = key(None, "null: base_dir/<algorithm>_<dataset type>_<seed>")
    save_final_model: Literal["auto", True, False] = key(
        "auto",
        "final_model/agent_N/, with a model card; auto: adapters and SHPPO's networks, which "
        "are small",
    )
    save_best: bool = key(False, "best_model/: as at the evaluation with the highest reward")
    overwrite: bool = key(False, "where `dir` holds a run: move all of it aside, to <dir>.1")
    verbose: bool = key(False, "every episode to episodes.jsonl")


@dataclass(frozen=True)
class ExternalConfig:
    """What agents read between turns."""

    mode: str | None = key(
        None,
        "what agents read before a revision (docs/external.md): plain, expert_edits, a mode "
        "of the domain's (code: level_feedback, level_passed, passed) or module:Class; null: "
        "the domain's first; plain where it has none, or with a reward.target",
    )
    sandbox_slice: int | str | None = key(1, "tests that feedback may show; 0, null, all: every")
    expert_model: str = key("deepseek-coder", "of mode expert_edits")
    expert_base_url: str | None = key(None, "null: the provider's of the model's name")
    on_error: Literal["stop", "plain"] = key(
        "stop",
        "where the expert fails; plain: ask for a revision without it",
    )
    history: Literal["full", "last"] = key("full", "the whole conversation, or the newest attempt")
    original_prompt: bool = key(False, "history: last only")
    previous_response: bool = key(True, "history: last only")


@dataclass(frozen=True)
class SandboxConfig:
    """How what models write is run, where the domain runs it."""

    isolation: Literal["auto", "namespaces", "bubblewrap", "unshare", "limits"] = key(
        "auto",
        "what shuts a program in: docs/sandbox.md",
    )
    workers: int | None = key(None, "null: the CPU cores", at_least=1)
    timeout: float = key(
        10.0,
        "wall-clock seconds for each test; all tests of a program have three times that together",
        above=0,
    )
    memory_mb: int = key(512, "of a program", above=0)


@dataclass(frozen=True)
class RewardConfig:
    """What a joint action earns."""

    target: str | None = key(
        None,
        "module:Class of another reward for the same work (docs/cookbook.md); null: the "
        "domain's own",
    )
    arguments: dict[str, Any] = key({}, "by name, of that class; code's are in docs/reward.md")
    by_agent: Literal["own", "mean"] = key(
        "own",
        "what agents learn from where the reward gives each its own: that, or their mean",
    )


@dataclass(frozen=True)
class RewardProcessorConfig:
    """Training reward = scale_factor · reward + shift, where enabled."""

    enabled: bool = key(True, "false: training reward = reward")
    scale_factor: float = key(1.0, "multiplies the reward", above=0)
    shift: float = key(0.0, "is added after that")


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; no section: off."""

    project: str = key("comlrl", "where the run is shown")
    entity: str | None = key(None, "user or team; null: the login's")
    name: str | None = key(None, "null: that of the run directory")
    dir: str | None = key(None, "of W&B's own files; null: the run directory")
    tags: list[str] = key([], "shown with the run")
    mode: Literal["online", "offline", "disabled"] | None = key(
        None,
        "null: online where there is a login",
    )


@dataclass(frozen=True)
class GenerationConfig:
    """What samples completions in training; evaluate.py always takes the builtin."""

    backend: Literal["builtin", "vllm"] = key("builtin", "vllm: a server (docs/scaling.md)")
    max_batch_tokens: int = key(
        262144,
        "builtin: key/value slots held at once; more is split",
        above=0,
    )
    max_support: int = key(
        256,
        "where top_p or top_k truncate: tokens of a position's set that are kept to learn "
        "over it; of a larger set a threshold is (docs/concepts.md)",
        above=0,
    )
    vllm_url: str | None = key(None, "of the server, e.g. http://localhost:8000")
    vllm_patience: float = key(
        300.0,
        "seconds without an answer after which a run saves and stops",
        above=0,
    )
    importance_cap: float = key(
        2.0,
        "of π/μ, trained policy over server's, by which a completion's gradient is multiplied",
        at_least=1,
    )
    overlap: Literal[0, 1] = key(
        0,
        "vllm: 1: a step's first turn is sampled while the step before it updates, by the "
        "policies from before that update",
    )


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes under torchrun."""

    strategy: Literal["replicate", "fsdp"] = key("replicate", "a copy on each process, or shards")


@dataclass(frozen=True)
class RoleSampling:
    """One agent's sampling; null: as the algorithm's section says."""

    max_new_tokens: int | None = key(None, "of a completion", at_least=1)
    temperature: float | None = key(None, "of its tokens", above=0)
    top_p: float | None = key(None, "nucleus", above=0, at_most=1)
    top_k: int | None = key(None, "tokens at most", at_least=1)


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

    seed: int = key(42, "of everything that is drawn at random")
    domain: str = key("code", "what the team works on: code, writing, or module:NAME")
    prompts: dict[str, str] = key(
        {},
        "templates in the place of the domain's, by role; also system, and revision: what "
        "feedback ends with",
    )
    sampling: dict[str, Any] = key(
        {},
        "by role: max_new_tokens, temperature, top_p and top_k of that agent alone; left out:"
        " those of the algorithm's section",
    )
    init_from: str | None = key(
        None,
        "a run (of any algorithm), its best_model, …, or adapters in PEFT's format to start from",
    )
    agents: list[str] | None = key(
        None,
        "one model for each agent, instead of adapters on agent_model",
    )
    agent_devices: list[str] | None = key(None, "where each of `agents` is, e.g. [cuda:0, cuda:1]")
