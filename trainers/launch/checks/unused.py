"""Reports settings that have no effect where they stand, a line for each reason.

A setting counts as given where a file, a flag or an override names it with another value than the
default. What contradicts something else is refused by ``validate`` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from comlrl.config.algorithms import (
    SECTIONS,
    ActorCriticConfig,
    CommonConfig,
    MAGRPOConfig,
    MARLHFConfig,
    PPOConfig,
    PreferenceConfig,
    SHPPOConfig,
)
from comlrl.config.resolved import Config
from comlrl.config.sections import SECTIONS as SHARED
from comlrl.tasks.prompts import PREFILL, REVISION
from trainers.launch.wiring.resolved_work import Work
from trainers.launch.wiring.sampling_settings import KEYS, sampling

# Keys, and why they have no effect. "<algo>" is a section that the run reads; a section's name
# alone means all of its keys.
Unused = Iterator[tuple[str, str]]


def without_effect(config: Config, work: Work, given: Mapping[str, str]) -> list[str]:
    """One line for each reason, with the settings that were given in vain.

    ``given``: key → where it was given.
    """
    lines, reported = [], set()
    for pattern, reason in _unused(config, work):
        keys = [key for key in dict.fromkeys(_keys(config, pattern)) if key in given]
        keys = [key for key in keys if key not in reported]
        keys = [key for key in keys if _value(config, key) != _default(config, work, key)]
        reported |= set(keys)
        if keys:
            values = ", ".join(f"{key}={_value(config, key)}" for key in keys)
            verb = "has" if len(keys) == 1 else "have"
            lines.append(f"{values} {verb} no effect: {reason}")
    if config.online.num_turns == 1 and REVISION in config.prompts:
        lines.append("prompts.revision has no effect: nothing follows a single turn")
    if work.program is not None and PREFILL in config.prompts:
        lines.append("prompts.prefill has no effect: the program writes what its calls end with")
    return [line.replace("<algo>", config.algorithm) for line in lines]


def _all_have_their_own(config: Config, key: str) -> bool:
    values = [getattr(own, key) for own in config.sampling.values()]
    return len(values) == config.section.num_agents and None not in values


def _truncates(config: Config, work: Work) -> bool:
    drawn = sampling(config, work.roles)
    return any(drawn.of(agent).truncates for agent in range(config.section.num_agents))


def _unused(config: Config, work: Work) -> Unused:
    """All of them; where several reasons hold for a key, the first is the one to tell."""
    section, online = config.section, config.online
    yield from _turns(config, work, online)
    yield from _agents(online)
    if isinstance(online, SHPPOConfig):
        yield from _latents(online)
    yield from _shared(config, work, online)
    if work.program is None:
        yield "program", "no program.target or program.command: agents act in turns"
    if isinstance(section, PreferenceConfig):
        yield from _preferences(config, section)
    if isinstance(online, ActorCriticConfig):
        yield from _actor_critic(online)
    if not online.takes_ratios:
        yield "<algo>.clip_range", "update_epochs=1: each sample is used once, without a ratio"
    yield from _generation(config, work)


def _turns(config: Config, work: Work, section: CommonConfig) -> Unused:
    if work.program is not None:
        yield (
            "<algo>.early_termination_threshold <algo>.handoff_width external",
            "the program says who acts when",
        )
    elif section.num_turns == 1:
        yield (
            "<algo>.discount <algo>.early_termination_threshold <algo>.handoff "
            "<algo>.handoff_width external",
            "nothing follows a single turn",
        )
        if not _by_token(section):
            yield "<algo>.gae_lambda", "λ is over turns here, and there is one"
    if not _by_token(section):
        yield "<algo>.gamma_token", "values are of turns here"
    if section.num_turns > 1:
        yield from _external(config, work)
    if section.handoff is None:
        yield "<algo>.handoff_width", "handoff=null hands on every joint action"
    elif (
        section.handoff_width == 1
        and section.turn_order == "simultaneous"
        and _advantage_of(section, "mean", "rloo", "max")
    ):
        yield (
            "<algo>.discount",
            "with one joint action handed on, the future is the same for all siblings and "
            "cancels; handoff_width above 1 credits futures",
        )


def _external(config: Config, work: Work) -> Unused:
    external = config.external
    if external.history == "full":
        yield (
            "external.original_prompt external.previous_response",
            "external.history=full shows every turn whole; history=last reads them",
        )
    if external.mode != "expert_edits":
        yield (
            "external.expert_model external.expert_base_url external.on_error",
            "no expert is asked unless external.mode=expert_edits",
        )
    if "sandbox_slice" not in work.mode.keys_read:
        yield "external.sandbox_slice", "this external.mode does not read it"


def _agents(section: CommonConfig) -> Unused:
    if section.num_agents == 1:
        yield "<algo>.joint_mode", "one agent's completions are the joint actions"
        yield (
            "<algo>.turn_order <algo>.num_generations_sequential",
            "one agent acts after nobody",
        )
        yield "<algo>.lambda_d", "one agent is at no distance"
        yield "<algo>.shared_policy", "one agent has one policy"
    if section.turn_order == "simultaneous":
        yield (
            "<algo>.num_generations_sequential",
            "all agents act at once, with num_generations each",
        )
    elif section.chains:
        yield "<algo>.num_generations_sequential", "rollouts are chains: later agents answer once"
    elif not section.trained_online:
        yield (
            "<algo>.num_generations_sequential",
            "each later agent answers a candidate's text once",
        )


def _latents(section: SHPPOConfig) -> Unused:
    if section.latents != "learned":
        yield (
            "<algo>.latent_gradient <algo>.latent_hidden <algo>.lambda_e <algo>.lambda_d "
            "<algo>.latent_learning_rate <algo>.inference_learning_rate",
            "these latents are not learned",
        )
    if section.latent_gradient == "policy":
        yield "<algo>.inference_learning_rate", "latent_gradient=policy has no inference net"


def _shared(config: Config, work: Work, section: CommonConfig) -> Unused:
    if not work.reward_arguments.keys() & {f.name for f in fields(config.sandbox)}:
        yield "sandbox", "this reward runs nothing in it"
    if not work.rewards_each and work.program is None:
        yield "reward.by_agent", "this reward gives all agents one value"
    if section.eval_interval == 0:
        yield (
            "<algo>.eval_num_samples <algo>.eval_answers",
            "eval_interval=0: nothing is evaluated",
        )
    if not config.lora.enabled:
        yield (
            "lora.r lora.alpha lora.dropout lora.target_modules",
            "lora.enabled=false: all weights are trained",
        )
    if not config.reward_processor.enabled:
        yield (
            "reward_processor.scale_factor reward_processor.shift",
            "reward_processor.enabled=false",
        )
    elif (
        _advantage_of(section, "mean", "rloo", "max", "greedy")
        and section.early_termination_threshold is None
    ):
        yield (
            "reward_processor.shift",
            "it cancels where returns are compared, and no early_termination_threshold reads it",
        )
    if config.agents is not None:
        yield "agent_model.name", "agents names every model"
    own = config.section
    for name, value in (
        ("temperature", own.temperature),
        ("top_p", own.top_p),
        ("top_k", own.top_k),
    ):
        if value is not None:
            yield f"agent_model.{name}", f"the algorithm's own {name} is taken"
    for name in KEYS:
        if _all_have_their_own(config, name):
            keys = (
                f"<algo>.{name}"
                if name == "max_new_tokens"
                else f"<algo>.{name} agent_model.{name}"
            )
            yield keys, f"sampling gives every agent its own {name}"


def _preferences(config: Config, section: PreferenceConfig) -> Unused:
    if not section.trained_online:
        yield "reward_processor", "preferences compare rewards as they are"
        yield (
            "<algo>.num_generations <algo>.turn_gradient_weights",
            "MADPO learns from preference_num_candidates joint candidates of a task",
        )
    if section.num_iterations == 1:
        yield (
            "<algo>.replay <algo>.replay_rounds <algo>.replay_lambda <algo>.refit_below",
            "num_iterations=1: there is one round",
        )
    if section.replay in ("current", "all"):
        yield "<algo>.replay_rounds", "only replay=last_k and lambda_decay read it"
    if section.replay != "lambda_decay":
        yield "<algo>.replay_lambda", "only replay=lambda_decay reads it"
    if section.preferences is not None:
        yield (
            "<algo>.preference_num_candidates <algo>.comparator",
            "candidates are read from <algo>.preferences",
        )
    if isinstance(section, MARLHFConfig):
        yield from _reward_model(config, section)


def _reward_model(config: Config, section: MARLHFConfig) -> Unused:
    if section.reward_model is not None:
        yield (
            "<algo>.preference_num_candidates <algo>.preference_pairs_per_sample "
            "<algo>.pair_selection <algo>.preference_holdout <algo>.preferences <algo>.comparator "
            "<algo>.reward_model_name <algo>.reward_learning_rate <algo>.reward_num_train_epochs "
            "<algo>.reward_train_batch_size <algo>.reward_max_length <algo>.reward_margin "
            "<algo>.reward_prompts <algo>.reward_freeze_backbone",
            "the reward model is read from marlhf.reward_model",
        )
    if config.online_name == "ppo":
        yield "magrpo", "marlhf.rl_algorithm=ppo reads the section `ppo`"
    else:
        yield "ppo", "only marlhf.rl_algorithm=ppo reads it"


def _actor_critic(section: ActorCriticConfig) -> Unused:
    if isinstance(section, PPOConfig):
        if section.kl_coef == 0:
            yield "<algo>.kl_in", "kl_coef=0: no KL is paid"
        if section.kl_target is None:
            yield "<algo>.kl_horizon", "kl_coef is fixed without kl_target"
    if section.ppo_epochs == 1:
        yield "<algo>.target_kl", "ppo_epochs=1 leaves no epoch to end early"
        if section.train_batch_size is None:
            yield (
                "<algo>.clip_range <algo>.value_clip_range",
                "the only update of a step is that of the policy that sampled: its ratio is 1",
            )


def _generation(config: Config, work: Work) -> Unused:
    vllm, online = config.generation.backend == "vllm", config.section.trained_online
    if not (online and _truncates(config, work)):
        yield "generation.max_support", "no log-probability is over what top_p or top_k leave"
    if not vllm:
        yield (
            "generation.vllm_url generation.vllm_patience generation.importance_cap",
            "no server is asked unless generation.backend=vllm",
        )
        return
    yield "generation.max_support", "a server returns whole sets"
    if not online:
        yield (
            "generation.importance_cap",
            "learning from preferences does not ask how likely they were drawn",
        )
    yield "generation.max_batch_tokens", "the server forms the batches"


def _advantage_of(section: CommonConfig, *names: str) -> bool:
    return isinstance(section, MAGRPOConfig) and section.advantage in names


def _by_token(section: CommonConfig) -> bool:
    """PPO's values are of tokens or of turns; SHPPO's are of turns."""
    return isinstance(section, PPOConfig) and section.granularity == "token"


def _keys(config: Config, pattern: str) -> Iterator[str]:
    """The dotted keys of a pattern, in every section that the run reads."""
    for word in pattern.split():
        heads = dict.fromkeys((config.algorithm, config.online_name))
        for key in [word.replace("<algo>", head) for head in heads]:
            head, _, name = key.partition(".")
            names = [f.name for f in fields(_class(head))]
            yield from (f"{head}.{n}" for n in names if n == name or not name)


def _class(section: str) -> Any:
    return SHARED.get(section) or SECTIONS[section]


def _value(config: Config, key: str) -> Any:
    head, _, name = key.partition(".")
    return getattr(config.sections.get(head) or getattr(config, head), name)


def _default(config: Config, work: Work, key: str) -> Any:
    head, _, name = key.partition(".")
    if key == "external.mode" and config.external.mode is not None:  # null means one of them
        return work.default_mode
    return getattr(_class(head)(), name)
