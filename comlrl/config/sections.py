"""The sections that every algorithm has, and the keys at the top of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from comlrl.config.keys import Section, Unused, key
from comlrl.config.unused import BY_PROGRAM, SINGLE_TURN, overridden, sampled_apart

ALL_WEIGHTS = Unused("lora.enabled=false: all weights are trained", lambda s, _: not s.enabled)
NO_EXPERT = Unused(
    "no expert is asked unless external.mode=expert_edits", lambda s, _: s.mode != "expert_edits"
)
FULL_HISTORY = Unused(
    "external.history=full shows every turn whole; history=last reads them",
    lambda s, _: s.history == "full",
)
NO_PROCESSOR = Unused("reward_processor.enabled=false", lambda s, _: not s.enabled)
SHIFT_CANCELS = Unused(
    "it cancels where returns are compared, and no early_termination_threshold reads it",
    lambda _, c: (
        c.online.baseline not in (None, "raw") and c.online.early_termination_threshold is None
    ),
)
NO_SERVER = Unused(
    "no server is asked unless generation.backend=vllm", lambda s, _: s.backend != "vllm"
)


@dataclass(frozen=True, kw_only=True)
class AgentModelConfig(Section):
    """The base model of homogeneous agents, and how every agent samples."""

    name: str = key(
        "builtin:tiny-coder",
        "builtin:tiny-coder, builtin:tiny-player (arena), a hub name or a local folder",
        unused_if=(Unused("agents names every model", lambda s, c: s.name not in c.agent_models),),
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key(
        "auto",
        "auto: bfloat16 on GPUs that support it and on CPUs that are faster with it (AMX, or AMD "
        "with AVX-512 bfloat16), otherwise float32. Trained weights have float32 masters in the "
        "optimizer",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto",
        "attention kernel of transformers; auto: sdpa, or eager for models that sdpa does not "
        "support (Gemma 2, which caps its scores)",
    )
    tokenizer_kwargs: dict[str, Any] = key({}, "arguments of AutoTokenizer")
    model_kwargs: dict[str, Any] = key({}, "arguments of AutoModelForCausalLM")
    special_tokens: dict[str, str] = key({}, "pad_token, eos_token, …")
    temperature: float = key(
        1.0,
        "used if the algorithm's section sets null",
        above=0,
        unused_if=(*overridden("temperature"),),
    )
    top_p: float | None = key(
        None,
        "nucleus sampling; null: no truncation",
        above=0,
        at_most=1,
        unused_if=(*overridden("top_p"),),
    )
    top_k: int | None = key(
        None, "null: no truncation", at_least=1, unused_if=(*overridden("top_k"),)
    )
    stop: list[str] = key(
        [],
        "texts that end a completion beside the model's own end, whatever tokens they fall into; "
        "the completion's text ends before the first of them, and its tokens are trained up to it",
        unused_if=(sampled_apart("stop"),),
    )
    max_length: int = key(2048, "maximum tokens of prompt and completion together")
    chat: Literal["auto", True, False] = key(
        "auto",
        "prompts as messages in the tokenizer's chat template; auto: if the template ends a turn "
        "with the model's end of sequence, which a base model's does not; otherwise plain text",
    )
    template_arguments: dict[str, Any] = key(
        {}, "arguments of the chat template, e.g. {enable_thinking: false}"
    )
    gradient_checkpointing: bool = key(False, "less memory in the update, about a third slower")
    update_attention: Literal["grids", "tree", "compiled"] = key(
        "grids",
        "how packed rows attend in the update, for Qwen2, Qwen3 and Llama; grids: prompts and "
        "completions by padded batches; tree: all by one mask, with FlexAttention on a GPU; "
        "compiled: tree, in layers compiled by torch.compile (experimental, docs/scaling.md)",
        unused_if=(
            Unused(
                "with gradient_checkpointing nothing is compiled",
                lambda s, _: s.gradient_checkpointing and s.update_attention == "compiled",
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LoraSection(Section):
    """LoRA adapters on one shared frozen base; off: each agent trains all weights of a copy."""

    enabled: bool = key(True, "false: all weights are trained")
    r: int = key(16, "rank of the adapters", at_least=1, unused_if=(ALL_WEIGHTS,))
    alpha: float | None = key(None, "null: 2 r", above=0, unused_if=(ALL_WEIGHTS,))
    dropout: float = key(
        0.0,
        "dropout of the adapters; 0 for PPO and SHPPO",
        at_least=0,
        below=1,
        unused_if=(ALL_WEIGHTS,),
    )
    target_modules: Any = key(
        "all-linear", '"all-linear" or a list of module names', unused_if=(ALL_WEIGHTS,)
    )

    @property
    def effective_alpha(self) -> float:
        """Return ``alpha``, or its default of 2 r."""
        return 2 * self.r if self.alpha is None else self.alpha


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(Section):
    """The problems: rows with the columns that the domain reads."""

    name: str = key(
        "builtin:coopmini",
        "builtin:coopmini, builtin:coopmini-long, builtin:functions (or functions-starter, -easy, "
        "-medium, -hard), builtin:posts (writing), builtin:arena-NAME, "
        "a hub name, a folder, or .jsonl/.json/.parquet",
    )
    type: str | None = key(None, "a short name for the run directory; null: from the name")
    train_split: str = key("train", "e.g. train, test[33:163]")
    eval_split: str = key("eval", "held-out tasks, with the same slicing")
    on_bad_row: Literal["error", "skip"] = key("error", "skip: leave the row out with a notice")

    @property
    def short_name(self) -> str:
        """Return ``type``, or else the last part of the name."""
        return self.type or Path(self.name.replace(":", "/")).stem


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Section):
    """The files that a run writes."""

    base_dir: str = key("outputs", "parent of run directories when output.dir is null")
    dir: str | None = key(None, "null: base_dir/<algorithm>_<dataset type>_<seed>")
    save_final_model: Literal["auto", True, False] = key(
        "auto",
        "final_model/agent_N/, with a model card; auto: adapters and SHPPO's networks, which "
        "are small",
    )
    save_best: bool = key(False, "save the best evaluated weights to best_model/")
    overwrite: bool = key(False, "if `dir` holds a run, rename it to <dir>.1")
    verbose: bool = key(False, "write every episode to episodes.jsonl")


@dataclass(frozen=True, kw_only=True)
class ExternalConfig(Section):
    """The feedback that agents read between turns."""

    unused_if: ClassVar[tuple[Unused, ...]] = (
        BY_PROGRAM,
        SINGLE_TURN,
    )

    mode: str | None = key(
        None,
        "feedback before a revision (docs/external.md): plain, expert_edits, a mode of the domain "
        "(code: level_feedback, level_passed, passed) or module:Class; null: the domain's first "
        "mode, or plain if it has none or reward.target is set",
    )
    sandbox_slice: int | Literal["all"] | None = key(
        1, "tests that feedback may show; 0, null, all: all tests"
    )
    expert_model: str = key("deepseek-coder", "model of mode expert_edits", unused_if=(NO_EXPERT,))
    expert_base_url: str | None = key(
        None, "null: the address of the model's provider", unused_if=(NO_EXPERT,)
    )
    on_error: Literal["stop", "plain"] = key(
        "stop", "if the expert fails; plain: ask for a revision without it", unused_if=(NO_EXPERT,)
    )
    history: Literal["full", "last"] = key("full", "the whole conversation, or the newest attempt")
    original_prompt: bool = key(False, "history: last only", unused_if=(FULL_HISTORY,))
    previous_response: bool = key(True, "history: last only", unused_if=(FULL_HISTORY,))


@dataclass(frozen=True)
class SandboxConfig(Section):
    """The isolation of model-written code, in domains that run code."""

    isolation: Literal["auto", "namespaces", "bubblewrap", "unshare", "limits"] = key(
        "auto",
        "isolation level of programs: docs/sandbox.md",
    )
    workers: int | None = key(
        None, "programs that run at once; null: one for each CPU core", at_least=1
    )
    timeout: float = key(
        10.0,
        "wall-clock seconds for each test; all tests of a program together get three times that",
        above=0,
        at_most=86_400,
    )
    memory_mb: int = key(512, "memory limit of a program", above=0)


@dataclass(frozen=True)
class RewardConfig(Section):
    """The reward of a joint action."""

    target: str | None = key(
        None,
        "module:Class of another reward for the same task (docs/cookbook.md); null: the "
        "domain's reward",
    )
    arguments: dict[str, Any] = key(
        {}, "arguments of the reward class by name; docs/reward.md lists those of code"
    )
    by_agent: Literal["own", "mean"] = key(
        "own",
        "if the reward sets a reward for each agent: agents learn from their own, or from the mean",
    )


@dataclass(frozen=True, kw_only=True)
class ProgramConfig(Section):
    """A function that plays each task's episodes, in place of turns (docs/programs.md)."""

    unused_if: ClassVar[tuple[Unused, ...]] = (
        Unused(
            "no program.target or program.command: agents act in turns",
            lambda s, _: not s.replaces_turns,
        ),
    )

    target: str | None = key(None, "module:NAME of an `async def play(task, agents)`; null: turns")
    command: str | None = key(
        None,
        "in place of target: a command, run once an episode, that reaches its agents by "
        "OPENAI_BASE_URL",
    )
    agents: list[str] = key([], "what the function calls the agents, in the order of num_agents")
    on_error: Literal["stop", "zero"] = key(
        "stop",
        "where the function raises: stop the run; zero: the episode scores 0, counted and logged",
    )
    timeout: float = key(600.0, "seconds of an episode, without those of sampling", above=0)
    max_calls: int = key(64, "completions of an episode", at_least=1)

    @property
    def replaces_turns(self) -> bool:
        """Return whether a program plays the episodes."""
        return self.target is not None or self.command is not None


@dataclass(frozen=True)
class RewardProcessorConfig(Section):
    """Training reward = scale_factor · reward + shift, if enabled."""

    unused_if: ClassVar[tuple[Unused, ...]] = (
        Unused(
            "preferences compare rewards as they are", lambda _, c: not c.section.trained_online
        ),
    )

    enabled: bool = key(True, "false: training reward = reward")
    scale_factor: float = key(
        1.0, "multiplies the reward", above=0, at_most=1e15, unused_if=(NO_PROCESSOR,)
    )
    shift: float = key(
        0.0,
        "added to the scaled reward",
        at_least=-1e15,
        at_most=1e15,
        unused_if=(
            NO_PROCESSOR,
            SHIFT_CANCELS,
        ),
    )

    def process(self, reward: float) -> float:
        """Return the training reward."""
        scale, shift = (self.scale_factor, self.shift) if self.enabled else (1.0, 0.0)
        return scale * reward + shift


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Section):
    """Weights & Biases; no section: off."""

    project: str = key("comlrl", "project of the run")
    entity: str | None = key(None, "user or team; null: the login's")
    name: str | None = key(None, "null: the name of the run directory")
    dir: str | None = key(None, "folder of W&B's own files; null: the run directory")
    tags: list[str] = key([], "tags of the run")
    mode: Literal["online", "offline", "disabled"] | None = key(
        None,
        "null: online if you are logged in",
    )


@dataclass(frozen=True)
class TrackioConfig(Section):
    """Trackio (`pip install trackio`); no section: off."""

    project: str = key("comlrl", "project of the run")
    name: str | None = key(None, "null: the name of the run directory and a random ending")
    dir: str | None = key(None, "folder of the project; null: TRACKIO_DIR, or Trackio's own")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Section):
    """The sampling backend of training; evaluate.py always uses the built-in generator."""

    backend: Literal["builtin", "vllm"] = key("builtin", "vllm: a server (docs/scaling.md)")
    max_batch_tokens: int = key(
        262144,
        "builtin: maximum key/value slots at once; larger batches are split",
        above=0,
        unused_if=(Unused("the server forms the batches", lambda s, _: s.backend == "vllm"),),
    )
    decoding: Literal["auto", "growing", "static", "graphs", "compiled"] = key(
        "auto",
        "builtin, for Qwen2, Qwen3 and Llama; auto: graphs on a GPU, growing elsewhere; "
        "growing: caches grow and finished rows leave; "
        "static: all steps have the same shapes; graphs: static, replayed as CUDA graphs on a GPU; "
        "compiled: graphs of layers compiled by torch.compile (experimental, docs/scaling.md)",
        unused_if=(
            Unused("the server decodes", lambda s, _: s.backend == "vllm"),
            Unused(
                "SHPPO's layer stands before the head", lambda _, c: c.section.networks is not None
            ),
        ),
    )
    max_support: int = key(
        256,
        "with top_p or top_k: maximum tokens stored of a position's set; larger sets are stored "
        "as a threshold (docs/concepts.md)",
        above=0,
        unused_if=(Unused("a server returns whole sets", lambda s, _: s.backend == "vllm"),),
    )
    vllm_url: Any = key(
        None,
        "address of the server, e.g. http://localhost:8000; or a list of several; or, if the "
        "agents' models differ, a mapping from each agent's role or model to either",
        unused_if=(NO_SERVER,),
    )
    vllm_command: str | None = key(
        None,
        "command that starts a server on this machine, which ends with the run; {model}, {port} "
        "and {device} (a GPU that does not train, where there is one) are filled in. vllm_url may "
        "be null then (docs/scaling.md)",
        unused_if=(NO_SERVER,),
    )
    vllm_patience: float = key(
        300.0,
        "seconds without a reply after which a run saves and stops",
        above=0,
        unused_if=(NO_SERVER,),
    )
    importance_cap: float = key(
        2.0,
        "maximum of the importance ratio π/μ (trained policy over server) of a completion",
        at_least=1,
        unused_if=(
            NO_SERVER,
            Unused(
                "learning from preferences does not ask how likely they were drawn",
                lambda _, c: not c.section.trained_online,
            ),
        ),
    )
    overlap: Literal[0, 1] = key(
        0,
        "vllm: with 1, a step is sampled and scored during the update before it, by the "
        "policies from before that update",
    )


@dataclass(frozen=True)
class DistributedConfig(Section):
    """Several processes under torchrun."""

    strategy: Literal["replicate", "fsdp"] = key("replicate", "a copy on each process, or shards")


@dataclass(frozen=True)
class EvaluationConfig(Section):
    """How agents sample in evaluations, during training and by evaluate.py."""

    temperature: float | None = key(
        None, "0: the likeliest tokens; null: as in training", at_least=0
    )
    top_p: float | None = key(None, "null: as in training; 1: no truncation", above=0, at_most=1)
    max_new_tokens: int | None = key(None, "null: as in training", at_least=1)


@dataclass(frozen=True)
class RoleSampling:
    """One agent's sampling; null: the algorithm's section."""

    max_new_tokens: int | None = key(None, "of a completion", at_least=1)
    temperature: float | None = key(None, "of its tokens", above=0)
    top_p: float | None = key(None, "nucleus", above=0, at_most=1)
    top_k: int | None = key(None, "tokens at most", at_least=1)
    stop: list[str] | None = key(None, "texts that end it, in place of agent_model.stop")


@dataclass(frozen=True, kw_only=True)
class AgentLora:
    """The adapter of one agent; null: as in the section `lora`."""

    r: int | None = key(
        None, "its rank; where `lora.alpha` is null, alpha is twice this", at_least=1
    )
    target_modules: Any = key(None, '"all-linear" or a list of module names')


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """A service with the chat completions of the OpenAI API, which plays an agent."""

    base_url: str | None = key(None, "its address, e.g. https://api.example.com/v1")
    model: str | None = key(None, "the name of the model there")
    key_env: str | None = key(
        None, "the environment variable that holds the key; null: the service needs none"
    )
    on_error: Literal["stop", "empty"] = key(
        "stop",
        "after the retries; stop: the run ends with a checkpoint; empty: the answer is empty, "
        "and counted",
    )
    timeout: float = key(60.0, "seconds of a request, with its complete answer", above=0)
    retries: int = key(3, "further requests after one that failed", at_least=0)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of one agent, in place of those of the common sections (null)."""

    model: str | None = key(None, "its base model; null: agent_model.name")
    learning_rate: float | None = key(
        None, "of its optimizer; null: the algorithm's section", above=0
    )
    sampling: Any = key(None, "temperature, top_p, top_k, max_new_tokens and stop")
    template_arguments: dict[str, Any] = key(
        {}, "arguments of its chat template, beside agent_model.template_arguments"
    )
    lora: Any = key(
        None, "r and target_modules (below); agents whose adapters differ each load the base"
    )
    api: Any = key(None, "a service that plays it (below); it is not trained")
    train: bool = key(
        True,
        "false: it acts and is not updated; checkpoints do not hold it, and it may start from an "
        "earlier run's weights (`init_from`)",
    )


SECTIONS: dict[str, type] = {
    "agent_model": AgentModelConfig,
    "lora": LoraSection,
    "dataset": DatasetConfig,
    "output": OutputConfig,
    "external": ExternalConfig,
    "sandbox": SandboxConfig,
    "reward": RewardConfig,
    "program": ProgramConfig,
    "reward_processor": RewardProcessorConfig,
    "wandb": WandbConfig,
    "trackio": TrackioConfig,
    "generation": GenerationConfig,
    "distributed": DistributedConfig,
    "evaluation": EvaluationConfig,
}
OPTIONAL_SECTIONS = ("wandb", "trackio")  # off unless a file contains them


@dataclass(kw_only=True)
class Root:
    """Keys that stand at the top of a file, outside any section."""

    seed: int = key(42, "seed of all randomness")
    domain: str = key("code", "the task of the team: code, writing, arena-NAME, or module:NAME")
    prompts: dict[str, str] = key(
        {},
        "style (code: usual, or dividing, which assigns each agent a part); templates by role "
        "that replace the domain's; also system (a message before all), revision (the end of every "
        "feedback) and prefill (how every answer starts)",
    )
    sampling: dict[str, Any] = key(
        {},
        "max_new_tokens, temperature, top_p, top_k and stop of single agents, by role; default: "
        "the algorithm's section, and agent_model.stop",
    )
    init_from: str | None = key(
        None,
        "start weights: a run of any algorithm, its best_model, …, or adapters in PEFT's format",
    )
    agents: Any = key(
        None,
        "role → what is particular to that agent (below); or a list with one model for each "
        "agent, instead of adapters on agent_model",
    )
    agent_devices: list[str] | None = key(None, "device of each of `agents`, e.g. [cuda:0, cuda:1]")
