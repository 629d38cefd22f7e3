"""The six algorithm sections as frozen dataclasses, and the relations between their keys.

No torch here, so that a mistake is answered before anything heavy loads. Symbols and equations
are in the docstrings of the trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from comlrl.config import Config, ConfigError, reward_arguments


@dataclass(frozen=True)
class CommonConfig:
    """Keys that every algorithm section has."""

    num_agents: int = 2  # helpers first, main last
    num_turns: int = 1  # attempts, with feedback between them
    num_generations: int = 4  # G: completions of each agent at a node
    joint_mode: Literal["align", "cross"] = "align"  # the g-th of each agent, or every combination
    handoff: Literal["random", "best"] | None = None  # null: a child of every joint action
    discount: float = 0.9  # between turns
    turn_gradient_weights: list[float] | None = None  # one for each turn; null: 1
    early_termination_threshold: float | None = None  # on the processed reward
    num_train_epochs: int | None = 1  # passes over the training tasks; null: the two below decide
    max_steps: int | None = None  # training steps
    max_env_steps: int | None = None  # scored joint actions
    batch_size: int = 16  # tasks whose trees are grown together in a training step
    # nodes in an optimizer update at most, in parts of like size; null: all of the step, on-policy
    train_batch_size: int | None = None
    learning_rate: float = 2e-4  # for LoRA; where all weights are trained, about a tenth
    # behind the warm-up: constant, or to 0 as the run comes to its end
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0  # optimizer updates in which the learning rate rises to its full height
    max_grad_norm: float = 1.0  # of each agent's gradient
    kl_coef: float = 0.0  # of the k3 KL to the reference policy
    max_new_tokens: int = 256  # of a completion
    temperature: float | None = None  # null: agent_model's
    top_p: float | None = None  # null: agent_model's
    top_k: int | None = None  # null: agent_model's
    logging_steps: int = 1  # training steps
    eval_interval: int = 0  # training steps; 0: never
    eval_num_samples: int | None = 4  # tasks; null: the whole split
    eval_answers: int = 1  # of the team to each of those tasks
    save_steps: int = 0  # training steps between checkpoints; 0: none
    save_total_limit: int | None = 2  # checkpoints kept; null: all


@dataclass(frozen=True)
class MAGRPOConfig(CommonConfig):
    """MAGRPO, arXiv 2508.04652."""

    # what a return is compared with: the siblings' mean, the others' mean, their maximum, the
    # return of a greedy rollout, nothing
    advantage: Literal["mean", "rloo", "max", "greedy", "raw"] = "mean"
    advantage_normalization: bool = False  # divide by the siblings' standard deviation


@dataclass(frozen=True)
class GRPOConfig(MAGRPOConfig):
    """MAGRPO with one agent that answers for the main function alone."""

    num_agents: int = 1


@dataclass(frozen=True)
class PreferenceConfig(CommonConfig):
    """Keys of the two algorithms that learn from preference pairs."""

    preference_num_candidates: int = 16  # joint candidates sampled for each task
    preference_pairs_per_sample: int | None = 4  # pairs kept for each task; null: all of them
    # which of the pairs; all: with preference_pairs_per_sample null
    pair_selection: Literal["reward_gap", "random", "all"] = "reward_gap"
    preference_holdout: float = 0.1  # share of the tasks whose pairs are kept to measure with
    preferences: str | None = None  # preferences.jsonl (or a run's folder) to read, not sample
    discount: float = 1.0


@dataclass(frozen=True)
class MADPOConfig(PreferenceConfig):
    """Multi-agent direct preference optimization."""

    dpo_beta: float = 0.1  # weight of the joint log-ratio
    dpo_reference: bool = False  # subtract the reference policy's log-ratio
    label_smoothing: float = 0.0  # share of pairs taken to be the wrong way round
    use_environment_step: bool = True  # x-axis: 2 · pairs trained; false: candidates scored
    train_agents: list[int] | None = None  # null: all; [1]: preference learning on main only


@dataclass(frozen=True)
class MARLHFConfig(PreferenceConfig):
    """Preferences → joint reward model → online reinforcement learning.

    The common keys hold for the collection, the loop and the online stage alike; they may stand
    here or in the RL algorithm's section (``share_common_keys``).
    """

    # of the online stage
    rl_algorithm: Literal["magrpo", "reinforce", "rloo", "remax", "ppo"] = "magrpo"
    reward_model: str | None = None  # read this reward model instead of training one
    reward_model_name: str | None = None  # its base; null: the agents'
    reward_learning_rate: float = 1e-5  # of the reward model
    reward_num_train_epochs: int = 1  # passes over the pairs
    reward_train_batch_size: int = 4  # pairs in an update
    reward_max_length: int = 2048  # tokens of a joint text
    # lead asked of a winner's score for each point of task reward that it is better by; 0: any lead
    reward_margin: float = 0.0
    reward_freeze_backbone: bool = False  # train the score head alone
    reward_min_accuracy: float = 0.55  # on held-out pairs; below it the run stops before RL


@dataclass(frozen=True)
class ActorCriticConfig(CommonConfig):
    """Keys that PPO and SHPPO share; ``train_batch_size`` is the size of a minibatch, in nodes."""

    ppo_epochs: int = 4  # passes over a step's samples
    clip_range: float = 0.2  # of the importance ratio around 1
    value_clip_range: float | None = 0.2  # of the value around its old one; null: no clipping
    value_learning_rate: float = 1e-3  # of the critic
    entropy_coef: float = 0.0  # weight of the entropy bonus
    gae_lambda: float = 0.95  # of generalized advantage estimation
    target_kl: float | None = None  # an epoch's mean KL(old ‖ new) that ends the epochs
    normalize_advantages: bool = True  # to mean 0 and standard deviation 1 within a step


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Proximal policy optimization, token by token."""

    num_agents: int = 1
    # a value head for each agent, or one V of all prompts
    critic: Literal["independent", "centralized"] = "independent"
    gamma_token: float = 1.0  # between the tokens of a turn
    kl_target: float | None = None  # mean KL of a token that kl_coef adapts to; null: fixed
    kl_horizon: int = 10000  # joint actions over which kl_coef may grow by a fifth


@dataclass(frozen=True)
class SHPPOConfig(ActorCriticConfig):
    """Scalable heterogeneous PPO, arXiv 2404.03869."""

    discount: float = 0.95
    gae_lambda: float = 0.9  # over turns
    latent_dim: int = 8  # of an agent's latent
    latent_hidden: int = 64  # width of the encoder's and the inference net's layers
    heterogeneous_rank: int = 16  # rank of A and B, size of the generated matrix
    lambda_e: float = 0.01  # of the latents' entropy
    lambda_d: float = 0.1  # of the distance between agents' latents
    latent_learning_rate: float = 1e-3  # of the encoder
    inference_learning_rate: float = 1e-3  # of the inference net


SECTIONS: dict[str, type] = {
    "grpo": GRPOConfig,
    "magrpo": MAGRPOConfig,
    "madpo": MADPOConfig,
    "marlhf": MARLHFConfig,
    "ppo": PPOConfig,
    "shppo": SHPPOConfig,
}
EXTRA_SECTIONS = {"marlhf": ("magrpo", "ppo")}  # read beside the algorithm's own


def sections_of(algorithm: str) -> dict[str, type]:
    """The sections that a file of this algorithm may have, its own first."""
    names = (algorithm, *EXTRA_SECTIONS.get(algorithm, ()))
    return {name: SECTIONS[name] for name in names}


def validate(config: Config) -> None:
    """Refuse values and relations that cannot work. Raises ConfigError."""
    if config.algorithm in ("madpo", "marlhf"):
        _preferences(config)
    for name, section in _read(config).items():
        _ranges(name, section)
        _relations(name, section, config)
    team = config.section.num_agents
    for key in ("agents", "agent_devices"):
        given = getattr(config, key)
        if given is not None and len(given) != team:
            raise ConfigError(
                f"{key}: {list(given)} has {len(given)} entries for "
                f"{config.algorithm}.num_agents={team}; give one for each agent"
            )
    if {"ppo", "shppo"} & set(_online(config)) and config.lora.dropout > 0:
        raise ConfigError(
            f"lora.dropout: {config.lora.dropout} would make the first PPO ratio differ from 1; "
            "set lora.dropout=0"
        )
    _shared(config)
    _reward(config)


def _reward(config: Config) -> None:
    arguments = reward_arguments(config.reward)
    values = {f.name: (getattr(arguments, f.name), f.default) for f in fields(arguments)}
    changed = [name for name, (value, default) in values.items() if value != default]
    if changed and config.section.num_agents == 1:
        key = f"reward.arguments.{changed[0]}"
        raise ConfigError(
            f"{key}: {getattr(arguments, changed[0])!r} has no effect on an agent without helpers; "
            f"leave it out, or set {config.algorithm}.num_agents above 1"
        )


def _ranges(name: str, section: CommonConfig) -> None:
    at_least: dict[str, float] = {
        "num_agents": 1, "num_turns": 1, "num_generations": 1, "batch_size": 1,
        "train_batch_size": 1, "max_new_tokens": 1, "num_train_epochs": 0, "max_steps": 0,
        "max_env_steps": 0, "warmup_steps": 0, "kl_coef": 0, "logging_steps": 1,
        "eval_interval": 0, "eval_num_samples": 1, "eval_answers": 1, "save_steps": 0,
        "save_total_limit": 1,
        "preference_num_candidates": 2, "preference_pairs_per_sample": 1,
        "ppo_epochs": 1, "latent_dim": 1, "latent_hidden": 1, "heterogeneous_rank": 1,
        "entropy_coef": 0, "lambda_e": 0, "lambda_d": 0, "kl_horizon": 1,
        "reward_num_train_epochs": 1, "reward_train_batch_size": 1, "reward_max_length": 8,
        "reward_margin": 0, "discount": 0,
    }  # fmt: skip
    above_zero = (
        "learning_rate", "max_grad_norm", "dpo_beta", "clip_range", "value_learning_rate",
        "value_clip_range", "target_kl", "kl_target", "latent_learning_rate",
        "inference_learning_rate", "reward_learning_rate",
    )  # fmt: skip
    for key, least in at_least.items():
        value = getattr(section, key, None)
        if value is not None and value < least:
            raise ConfigError(f"{name}.{key}: {value} is too small; give at least {least}")
    for key in above_zero:
        value = getattr(section, key, None)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}.{key}: {value} must be above 0")
    for key in ("discount", "gae_lambda", "gamma_token", "label_smoothing"):
        value = getattr(section, key, None)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name}.{key}: {value} must lie between 0 and 1")


def _relations(name: str, section: CommonConfig, config: Config) -> None:
    weights = section.turn_gradient_weights
    if weights is not None and len(weights) != section.num_turns:
        raise ConfigError(
            f"{name}.turn_gradient_weights: {list(weights)} has {len(weights)} weights for "
            f"{name}.num_turns={section.num_turns}; give one for each turn"
        )
    if weights is not None and min(weights) < 0:
        raise ConfigError(
            f"{name}.turn_gradient_weights: {list(weights)}; below 0 a turn would be unlearned: "
            "give 0 or more"
        )
    ends = (section.num_train_epochs, section.max_steps, section.max_env_steps)
    if all(end is None for end in ends):
        raise ConfigError(
            f"{name}.num_train_epochs: null, as are max_steps and max_env_steps; give one of them"
        )
    if (
        isinstance(section, MAGRPOConfig)
        and name in _online(config)
        and section.num_generations < 2
        and section.advantage != "raw"
    ):
        raise ConfigError(
            f"{name}.num_generations: {section.num_generations} leaves no siblings to compare "
            "with; give at least 2, or advantage=raw"
        )
    if name == "grpo" and section.num_agents != 1:
        raise ConfigError(f"grpo.num_agents: {section.num_agents}; GRPO has 1 agent, use magrpo")
    if (heat := temperature(section, config)) <= 0:
        raise ConfigError(f"{name}.temperature: {heat} samples nothing to learn from; give > 0")
    if (share := top_p(section, config)) is not None and not 0 < share <= 1:
        raise ConfigError(f"{name}.top_p: {share} must be above 0 and at most 1; null keeps all")
    if (most := top_k(section, config)) is not None and most < 1:
        raise ConfigError(f"{name}.top_k: {most} must be at least 1; null keeps all tokens")
    if isinstance(section, ActorCriticConfig):
        _actor_critic(name, section, config)


def _actor_critic(name: str, section: ActorCriticConfig, config: Config) -> None:
    if section.joint_mode != "align":
        raise ConfigError(f"{name}.joint_mode: '{section.joint_mode}'; rollouts are chains: align")
    if section.handoff is not None:
        raise ConfigError(
            f"{name}.handoff: '{section.handoff}'; rollouts are chains, so that every sample is "
            "followed: give null"
        )
    if isinstance(section, PPOConfig) and section.kl_target is not None and section.kl_coef == 0:
        raise ConfigError(
            f"{name}.kl_target: {section.kl_target} adapts kl_coef by factors, and 0 stays 0; "
            f"give {name}.kl_coef above 0"
        )
    if name == "shppo" and config.agents is not None:
        raise ConfigError(
            f"agents: {list(config.agents)}; SHPPO's agents share one policy: give "
            "agent_model.name, and agents=null"
        )


def online_name(config: Config) -> str:
    """The section that the online loop is built from; MARLHF's is its RL algorithm's."""
    return _online(config)[0]


def _online(config: Config) -> tuple[str, ...]:
    """Sections whose trainer samples online in this run."""
    if config.algorithm != "marlhf":
        return (config.algorithm,)
    return ("ppo",) if config.section.rl_algorithm == "ppo" else ("magrpo",)


def _read(config: Config) -> dict[str, CommonConfig]:
    """The sections that the run reads, as it reads them."""
    if config.algorithm != "marlhf":
        return {config.algorithm: config.section}
    return {"marlhf": config.section, _online(config)[0]: online_section(config)}


def share_common_keys(config: Config, given: Mapping[str, str]) -> Config:
    """MARLHF: one value of each common key, for the collection, the loop and the online stage.

    ``given``: key → where it was said. Said in both sections, the RL algorithm's own counts,
    unless only ``marlhf:``'s was said on the command line.
    """
    if config.algorithm != "marlhf":
        return config
    name = _online(config)[0]
    own, online = config.section, config.sections[name]
    values = {}
    for key in (f.name for f in fields(CommonConfig) if f.name not in SINGLE_TURN_KEYS):
        general, special = given.get(f"marlhf.{key}"), given.get(f"{name}.{key}")
        wins = special is None or (
            general is not None and general.startswith("--") and not special.startswith("--")
        )
        values[key] = getattr(own if wins else online, key)
    shared = {"marlhf": replace(own, **values), name: replace(online, **values)}
    return replace(config, sections={**config.sections, **shared})


SINGLE_TURN_KEYS = ("num_turns", "joint_mode", "handoff")  # have one value, each in its section
RL_ADVANTAGES = {"reinforce": "raw", "rloo": "rloo", "remax": "greedy"}


def online_section(config: Config) -> MAGRPOConfig | PPOConfig:
    """What MARLHF's online trainer is built from. Raises ConfigError for another advantage than
    ``rl_algorithm``'s."""
    section, algorithm = config.sections[_online(config)[0]], config.section.rl_algorithm
    advantage = RL_ADVANTAGES.get(algorithm)
    if advantage is None:
        return section
    if section.advantage not in (MAGRPOConfig.advantage, advantage):
        raise ConfigError(
            f"magrpo.advantage: '{section.advantage}' beside marlhf.rl_algorithm={algorithm}, "
            f"which is '{advantage}'; leave it out"
        )
    return replace(section, advantage=advantage)


def _preferences(config: Config) -> None:
    """What learning from preferences cannot do."""
    for name in dict.fromkeys((config.algorithm, *_online(config))):
        given = config.sections[name]
        if given.num_turns != 1:
            raise ConfigError(
                f"{name}.num_turns: {given.num_turns}; preferences compare single joint "
                "actions, so num_turns must be 1"
            )
        if given.joint_mode != "align":
            raise ConfigError(
                f"{name}.joint_mode: '{given.joint_mode}'; a preference pair is two aligned "
                "joint actions, so joint_mode must be align"
            )
        if given.handoff is not None:
            raise ConfigError(
                f"{name}.handoff: '{given.handoff}'; nothing follows a single turn: give null"
            )
    section, name = config.section, config.algorithm
    if section.pair_selection == "all" and section.preference_pairs_per_sample is not None:
        raise ConfigError(
            f"{name}.preference_pairs_per_sample: "
            f"{section.preference_pairs_per_sample} with pair_selection=all; set it to null"
        )
    least = 0.0 if isinstance(section, MADPOConfig) else 1e-9  # a reward model must be measured
    if not least <= section.preference_holdout < 1:
        raise ConfigError(
            f"{name}.preference_holdout: {section.preference_holdout} must lie between 0 and 1"
        )
    if isinstance(section, MADPOConfig):
        _madpo(section, config)
    elif getattr(online_section(config), "advantage", None) == "raw" and (shift := _shift(config)):
        raise ConfigError(
            f"reward_processor.shift: {shift:g} with marlhf.rl_algorithm={section.rl_algorithm} "
            "and no baseline: the scores' mean is 0 already, and all completions would be pushed "
            "one way; set reward_processor.shift=0"
        )


def _shift(config: Config) -> float:
    """What ``reward_processor`` adds to every reward."""
    return config.reward_processor.shift if config.reward_processor.enabled else 0.0


def _madpo(section: MADPOConfig, config: Config) -> None:
    if config.lora.dropout > 0:
        raise ConfigError(
            f"lora.dropout: {config.lora.dropout} with madpo, whose margins are computed without "
            "it and gradients with it; set lora.dropout=0"
        )
    if section.kl_coef > 0:
        raise ConfigError(
            f"madpo.kl_coef: {section.kl_coef}; DPO's reference is dpo_reference=true: give 0"
        )
    trained = section.train_agents
    if trained is not None and (
        not trained
        or len(set(trained)) < len(trained)
        or not all(0 <= agent < section.num_agents for agent in trained)
    ):
        raise ConfigError(
            f"madpo.train_agents: {list(trained)}; give numbers from 0 to "
            f"{section.num_agents - 1}, each once, or null"
        )


def _shared(config: Config) -> None:
    _output(config)
    if config.lora.r < 1:
        raise ConfigError(f"lora.r: {config.lora.r} is too small; give at least 1")
    if not 0 <= config.lora.dropout < 1:
        raise ConfigError(f"lora.dropout: {config.lora.dropout} must lie in [0, 1)")
    above_zero = {
        "lora.alpha": config.lora.alpha,
        "sandbox.timeout": config.sandbox.timeout,
        "sandbox.memory_mb": config.sandbox.memory_mb,
        "generation.max_batch_tokens": config.generation.max_batch_tokens,
        "reward_processor.scale_factor": config.reward_processor.scale_factor,
    }
    for key, value in above_zero.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{key}: {value} must be above 0")
    if config.sandbox.workers is not None and config.sandbox.workers < 1:
        raise ConfigError(f"sandbox.workers: {config.sandbox.workers}; give at least 1, or null")
    piece = config.external.sandbox_slice
    if isinstance(piece, str) and piece != "all":
        raise ConfigError(f"external.sandbox_slice: '{piece}'; give a whole number, null or 'all'")
    if config.agent_model.max_length <= config.section.max_new_tokens:
        raise ConfigError(
            f"agent_model.max_length: {config.agent_model.max_length} leaves no room for a prompt "
            f"before {config.algorithm}.max_new_tokens={config.section.max_new_tokens}"
        )


def _output(config: Config) -> None:
    output = config.output
    if output.overwrite and output.dir is None:
        raise ConfigError(
            "output.overwrite: true, where folders under output.base_dir are numbered; give "
            "output.dir, or leave it out"
        )
    if output.save_best and not config.section.eval_interval:
        raise ConfigError(
            f"output.save_best: true, and {config.algorithm}.eval_interval=0 evaluates nothing; "
            "give it above 0"
        )


def temperature(section: Any, config: Config) -> float:
    """The section's temperature, or agent_model's where it says null."""
    given = section.temperature
    return config.agent_model.temperature if given is None else given


def top_p(section: Any, config: Config) -> float | None:
    """The section's nucleus mass, or agent_model's where it says null."""
    return config.agent_model.top_p if section.top_p is None else section.top_p


def top_k(section: Any, config: Config) -> int | None:
    """The section's top-k, or agent_model's where it says null."""
    return config.agent_model.top_k if section.top_k is None else section.top_k


def shift_notice(config: Config) -> list[str]:
    """Without a baseline a shift of the reward is in every completion's advantage."""
    shift, section = _shift(config), _read(config)[online_name(config)]
    if getattr(section, "advantage", None) != "raw" or shift == 0:
        return []
    return [
        f"reward_processor.shift={shift:g} with advantage=raw, which has no baseline: every "
        "completion is pushed by it, whatever it earned"
    ]


def truncation_notice(config: Config) -> list[str]:
    """Where top-p or top-k truncate, what is sampled is not what the gradient is of."""
    p, k = top_p(config.section, config), top_k(config.section, config)
    cuts = [f"top_p={p}"] * (p is not None and p < 1) + [f"top_k={k}"] * bool(k)
    if not cuts:
        return []
    return [f"{', '.join(cuts)} truncate what is sampled; the gradient is of the whole policy"]
