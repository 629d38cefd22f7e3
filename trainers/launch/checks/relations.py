"""Refuses values and combinations of keys that cannot work; some others get a notice."""

from __future__ import annotations

from dataclasses import replace

from comlrl.config.algorithms import (
    ActorCriticConfig,
    CommonConfig,
    MADPOConfig,
    MAGRPOConfig,
    MARLHFConfig,
    PPOConfig,
    PreferenceConfig,
)
from comlrl.config.keys import check_ranges, keys_of
from comlrl.config.resolved import Config
from comlrl.config.sections import SECTIONS as SHARED
from comlrl.errors import UserError
from trainers.launch.cost.tree_size import growth
from trainers.launch.wiring import sampling_settings, vllm
from trainers.launch.wiring.resolved_work import Work, resolve_work
from trainers.launch.wiring.vllm_urls import urls


def validate(config: Config) -> Work:
    """What the run works on. Raises UserError for values and relations that cannot work."""
    for name in SHARED:
        if (section := getattr(config, name)) is not None:
            check_ranges(name, section)
    if isinstance(config.section, PreferenceConfig):
        _preferences(config)
    for name, section in _read(config).items():
        check_ranges(name, section)
        _relations(name, section, config)
    team = config.section.num_agents
    for key in ("agents", "agent_devices"):
        given = getattr(config, key)
        if given is not None and len(given) != team:
            raise UserError(
                f"{key}: {list(given)} has {len(given)} entries for "
                f"{config.algorithm}.num_agents={team}; give one for each agent"
            )
    if config.online.takes_ratios and config.lora.dropout > 0:
        raise UserError(
            f"lora.dropout: {config.lora.dropout} would be part of the importance ratio, which "
            "compares the policy with the one that sampled; set lora.dropout=0"
        )
    _shared(config)
    work = resolve_work(config)
    sampling_settings.check(config, work.roles)
    if config.generation.backend == "vllm":
        urls(config, work.roles)
    return work


def _relations(name: str, section: CommonConfig, config: Config) -> None:
    weights = section.turn_gradient_weights
    if weights is not None and len(weights) != section.num_turns:
        raise UserError(
            f"{name}.turn_gradient_weights: {list(weights)} has {len(weights)} weights for "
            f"{name}.num_turns={section.num_turns}; give one for each turn"
        )
    if weights is not None and min(weights) < 0:
        raise UserError(
            f"{name}.turn_gradient_weights: {list(weights)}; below 0 a turn would be unlearned: "
            "give 0 or more"
        )
    ends = (section.num_train_epochs, section.max_steps, section.max_env_steps)
    if all(end is None for end in ends):
        raise UserError(
            f"{name}.num_train_epochs: null, as are max_steps and max_env_steps; give one of them"
        )
    if (
        isinstance(section, MAGRPOConfig)
        and name == config.online_name
        and section.num_generations < 2
        and section.advantage != "raw"
    ):
        raise UserError(
            f"{name}.num_generations: {section.num_generations} leaves no siblings to compare "
            "with; give at least 2, or advantage=raw"
        )
    if section.turn_order == "sequential":
        _sequential(name, section)
    most = growth(replace(section, num_turns=1)).joint_actions
    if section.handoff is not None and section.handoff_width > most:
        raise UserError(
            f"{name}.handoff_width: {section.handoff_width} of a turn's {most} joint actions; give "
            f"at most {most}, or handoff=null, which hands all of them on"
        )
    if name == "grpo" and section.num_agents != 1:
        raise UserError(f"grpo.num_agents: {section.num_agents}; GRPO has 1 agent, use magrpo")
    if isinstance(section, ActorCriticConfig):
        _actor_critic(name, section, config)


def _sequential(name: str, section: CommonConfig) -> None:
    if section.joint_mode != "align":
        raise UserError(
            f"{name}.joint_mode: '{section.joint_mode}' with turn_order=sequential, where every "
            "agent already answers each completion that it reads: give align"
        )
    if not isinstance(section, MAGRPOConfig):
        return
    if section.num_generations_sequential < 2 and section.advantage != "raw":
        raise UserError(
            f"{name}.num_generations_sequential: {section.num_generations_sequential} leaves no "
            "siblings to compare with; give at least 2, or advantage=raw"
        )


def _actor_critic(name: str, section: ActorCriticConfig, config: Config) -> None:
    if section.joint_mode != "align":
        raise UserError(f"{name}.joint_mode: '{section.joint_mode}'; rollouts are chains: align")
    if section.handoff is not None:
        raise UserError(
            f"{name}.handoff: '{section.handoff}'; rollouts are chains, so that every sample is "
            "followed: give null"
        )
    if section.one_policy and config.agents is not None:
        raise UserError(
            f"agents: {list(config.agents)}; these agents share one policy: give "
            "agent_model.name, and agents=null"
        )
    if isinstance(section, PPOConfig):
        _ppo(name, section, config)


def _ppo(name: str, section: PPOConfig, config: Config) -> None:
    if section.critic == "centralized" and section.granularity == "token":
        raise UserError(
            f"{name}.granularity: token with {name}.critic=centralized; what all agents read "
            f"changes from turn to turn, not within one: give {name}.granularity=turn"
        )
    if section.kl_target is not None and section.kl_coef == 0:
        raise UserError(
            f"{name}.kl_target: {section.kl_target} adapts kl_coef by factors, and 0 stays 0; "
            f"give {name}.kl_coef above 0"
        )
    if section.critic_model is not None and config.distributed.strategy == "fsdp":
        raise UserError(
            f"{name}.critic_model: '{section.critic_model}' with distributed.strategy=fsdp, which "
            "would hold it whole in every process; set distributed.strategy=replicate"
        )
    if section.shared_policy and name != config.algorithm:
        raise UserError(
            f"{name}.shared_policy: true with {config.algorithm}, whose candidates come from "
            f"separate policies; give false"
        )


def _read(config: Config) -> dict[str, CommonConfig]:
    """The sections that the run reads, as it reads them."""
    return {config.algorithm: config.section, config.online_name: config.online}


def _preferences(config: Config) -> None:
    """What learning from preferences cannot do."""
    for name in dict.fromkeys((config.algorithm, config.online_name)):
        given = config.sections[name]
        if given.num_turns != 1:
            raise UserError(
                f"{name}.num_turns: {given.num_turns}; preferences compare single joint "
                "actions, so num_turns must be 1"
            )
        if given.handoff is not None:
            raise UserError(
                f"{name}.handoff: '{given.handoff}'; nothing follows a single turn: give null"
            )
        if given.joint_mode == "counterfactual" and isinstance(given, PreferenceConfig):
            raise UserError(
                f"{name}.joint_mode: 'counterfactual'; pairs are compared whole, whatever they "
                "differ in: give align or cross"
            )
    section, name = config.section, config.algorithm
    assert isinstance(section, PreferenceConfig)
    if section.pair_selection == "all" and section.preference_pairs_per_sample is not None:
        raise UserError(
            f"{name}.preference_pairs_per_sample: "
            f"{section.preference_pairs_per_sample} with pair_selection=all; set it to null"
        )
    _online_advantage(config)
    _rounds(name, section)
    _comparator(name, section, config)
    if isinstance(section, MADPOConfig):
        _madpo(section, config)
    elif (
        isinstance(section, MARLHFConfig)
        and _without_baseline(config.online)
        and (shift := _shift(config))
    ):
        raise UserError(
            f"reward_processor.shift: {shift:g} with marlhf.rl_algorithm={section.rl_algorithm} "
            "and no baseline: the scores' mean is 0 already, and all completions would be pushed "
            "one way; set reward_processor.shift=0"
        )


def _online_advantage(config: Config) -> None:
    """Raises UserError for another advantage than the one that ``rl_algorithm`` names."""
    wanted, online = config.section.online_advantage, config.sections[config.online_name]
    if wanted is None or not isinstance(online, MAGRPOConfig):
        return
    if online.advantage not in (MAGRPOConfig.advantage, wanted):
        assert isinstance(config.section, MARLHFConfig)
        raise UserError(
            f"magrpo.advantage: '{online.advantage}' beside marlhf.rl_algorithm="
            f"{config.section.rl_algorithm}, which is '{wanted}'; leave it out"
        )


def _comparator(name: str, section: PreferenceConfig, config: Config) -> None:
    kind, given = section.comparison
    if (kind, given) == ("reward", ""):
        return
    key = f"{name}.comparator: '{section.comparator}'"
    if kind not in ("model", "earlier") or not given:
        raise UserError(f"{key}; give reward, `model: NAME_OR_URL` or `earlier: RUN`")
    if section.pair_selection == "reward_gap":
        raise UserError(
            f"{key} with pair_selection=reward_gap, which is of the task reward; give random or all"
        )
    reads: dict[str, float | None] = {}  # the task reward
    if isinstance(section, MARLHFConfig):
        reads = {"reward_margin": section.reward_margin, "refit_below": section.refit_below}
    for other, value in reads.items():
        if value != keys_of(MARLHFConfig)[other].default:
            raise UserError(
                f"{name}.{other}: {value}, which reads the task reward, with "
                f"comparator='{section.comparator}'; leave one of them out"
            )
    if config.distributed.strategy == "fsdp":
        raise UserError(f"{key} with distributed.strategy=fsdp; give replicate")


def _rounds(name: str, section: PreferenceConfig) -> None:
    if section.replay == "last_k" and section.replay_rounds is None:
        raise UserError(f"{name}.replay_rounds: null with replay=last_k; give a number of rounds")
    rounds = section.num_iterations
    if rounds == 1:
        return
    read = {"preferences": section.preferences}
    if isinstance(section, MARLHFConfig):
        read["reward_model"] = section.reward_model
    for key, given in read.items():
        if given is not None:
            raise UserError(
                f"{name}.{key}: '{given}' with num_iterations={rounds}, whose rounds are of the "
                f"policies as they move; set num_iterations=1, or {key}=null"
            )
    if section.num_train_epochs is None and (section.max_steps or 0) < rounds:
        raise UserError(
            f"{name}.num_train_epochs: null, and max_steps={section.max_steps} cannot be divided "
            f"among num_iterations={rounds}; give num_train_epochs, the passes over a round's tasks"
        )


def _shift(config: Config) -> float:
    """What ``reward_processor`` adds to every reward."""
    return config.reward_processor.shift if config.reward_processor.enabled else 0.0


def _madpo(section: MADPOConfig, config: Config) -> None:
    if config.lora.dropout > 0:
        raise UserError(
            f"lora.dropout: {config.lora.dropout} with madpo, whose margins are computed without "
            "it and gradients with it; set lora.dropout=0"
        )
    if section.kl_coef > 0:
        raise UserError(
            f"madpo.kl_coef: {section.kl_coef}; DPO's reference is dpo_reference=start: give 0"
        )
    endless = section.num_train_epochs is None and section.max_steps is None
    if endless and not section.use_environment_step:
        raise UserError(
            f"madpo.max_env_steps: {section.max_env_steps} alone may never end a run whose steps "
            "are labelled candidates (use_environment_step=false), of which there are no more than "
            "its rounds label; give num_train_epochs or max_steps too"
        )
    trained = section.train_agents
    if trained is not None and (
        not trained
        or len(set(trained)) < len(trained)
        or not all(0 <= agent < section.num_agents for agent in trained)
    ):
        raise UserError(
            f"madpo.train_agents: {list(trained)}; give numbers from 0 to "
            f"{section.num_agents - 1}, each once, or null"
        )


def _shared(config: Config) -> None:
    _output(config)
    vllm.refuse(config)
    if config.agent_model.max_length <= config.section.max_new_tokens:
        raise UserError(
            f"agent_model.max_length: {config.agent_model.max_length} leaves no room for a prompt "
            f"before {config.algorithm}.max_new_tokens={config.section.max_new_tokens}"
        )


def _output(config: Config) -> None:
    output = config.output
    if output.overwrite and output.dir is None:
        raise UserError(
            "output.overwrite: true, where folders under output.base_dir are numbered; give "
            "output.dir, or leave it out"
        )
    if output.save_best and not config.section.eval_interval:
        raise UserError(
            f"output.save_best: true, and {config.algorithm}.eval_interval=0 evaluates nothing; "
            "give it above 0"
        )


def _without_baseline(section: CommonConfig) -> bool:
    return isinstance(section, MAGRPOConfig) and section.advantage == "raw"


def shift_notice(config: Config) -> list[str]:
    """Without a baseline a shift of the reward is in every completion's advantage."""
    shift = _shift(config)
    if not _without_baseline(config.online) or shift == 0:
        return []
    return [
        f"reward_processor.shift={shift:g} with advantage=raw, which has no baseline: every "
        "completion is pushed by it, whatever its reward"
    ]
