"""Settings that have no effect where they stand: a user who said one is told, in a line a reason.

A setting counts as said where a file, a flag or an override names it with another value than the
default. What contradicts something else is refused by ``validate`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from comlrl.config.resolved import Config

from comlrl.config.algorithms import SECTIONS, MAGRPOConfig
from comlrl.config.sections import SECTIONS as SHARED
from comlrl.tasks.prompts import REVISION
from trainers.launch.wiring.work import load_prompts, mode_reads, reward_reads, with_mode


@dataclass(frozen=True)
class Idle:
    """Keys that have no effect where ``when`` holds. "<algo>" is a section that the run reads; a
    section's name alone means all of its keys."""

    keys: str
    when: Callable[[Config, Any], bool]  # the configuration, and the section that samples online
    because: str


def _magrpo(section: Any, *advantages: str) -> bool:
    return isinstance(section, MAGRPOConfig) and section.advantage in advantages


TABLE = (
    Idle(
        "<algo>.discount <algo>.early_termination_threshold <algo>.handoff "
        "<algo>.handoff_width external",
        lambda c, s: s.num_turns == 1,
        "nothing follows a single turn",
    ),
    Idle(
        "<algo>.gae_lambda",
        lambda c, s: s.num_turns == 1 and not _by_token(s),
        "λ is over turns here, and there is one",
    ),
    Idle("<algo>.gamma_token", lambda c, s: not _by_token(s), "values are of turns here"),
    Idle(
        "external.original_prompt external.previous_response",
        lambda c, s: s.num_turns > 1 and c.external.history == "full",
        "external.history=full shows every turn whole; history=last reads them",
    ),
    Idle(
        "external.expert_model external.expert_base_url external.on_error",
        lambda c, s: s.num_turns > 1 and c.external.mode != "expert_edits",
        "no expert is asked unless external.mode=expert_edits",
    ),
    Idle(
        "external.sandbox_slice",
        lambda c, s: s.num_turns > 1 and "sandbox_slice" not in mode_reads(c, load_prompts(c)),
        "this external.mode does not read it",
    ),
    Idle(
        "sandbox",
        lambda c, s: not reward_reads(c) & {f.name for f in fields(c.sandbox)},
        "this reward runs nothing in it",
    ),
    Idle(
        "<algo>.joint_mode",
        lambda c, s: s.num_agents == 1,
        "one agent's completions are the joint actions",
    ),
    Idle(
        "<algo>.turn_order <algo>.num_generations_sequential",
        lambda c, s: s.num_agents == 1,
        "one agent acts after nobody",
    ),
    Idle(
        "<algo>.num_generations_sequential",
        lambda c, s: s.turn_order == "simultaneous",
        "all agents act at once, with num_generations each",
    ),
    Idle(
        "<algo>.handoff_width",
        lambda c, s: s.handoff is None,
        "handoff=null hands on every joint action",
    ),
    Idle(
        "<algo>.discount",
        lambda c, s: (
            s.handoff is not None
            and s.handoff_width == 1
            and s.turn_order == "simultaneous"
            and _magrpo(s, "mean", "rloo", "max")
        ),
        "with one joint action handed on, the future is the same for all siblings and cancels; "
        "handoff_width above 1 credits futures",
    ),
    Idle("<algo>.lambda_d", lambda c, s: s.num_agents == 1, "one agent is at no distance"),
    Idle(
        "<algo>.latent_gradient <algo>.latent_hidden <algo>.lambda_e <algo>.lambda_d "
        "<algo>.latent_learning_rate <algo>.inference_learning_rate",
        lambda c, s: getattr(s, "latents", "learned") != "learned",
        "these latents are not learned",
    ),
    Idle(
        "<algo>.inference_learning_rate",
        lambda c, s: getattr(s, "latent_gradient", None) == "policy",
        "latent_gradient=policy has no inference net",
    ),
    Idle(
        "<algo>.eval_num_samples <algo>.eval_answers",
        lambda c, s: s.eval_interval == 0,
        "eval_interval=0: nothing is evaluated",
    ),
    Idle(
        "lora.r lora.alpha lora.dropout lora.target_modules",
        lambda c, s: not c.lora.enabled,
        "lora.enabled=false: all weights are trained",
    ),
    Idle(
        "reward_processor.scale_factor reward_processor.shift",
        lambda c, s: not c.reward_processor.enabled,
        "reward_processor.enabled=false",
    ),
    Idle(
        "reward_processor.shift",
        lambda c, s: (
            c.reward_processor.enabled
            and _magrpo(s, "mean", "rloo", "max", "greedy")
            and s.early_termination_threshold is None
        ),
        "it cancels where returns are compared, and no early_termination_threshold reads it",
    ),
    Idle(
        "reward_processor",
        lambda c, s: not c.section.trained_online,
        "preferences compare rewards as they are",
    ),
    Idle(
        "<algo>.num_generations <algo>.turn_gradient_weights",
        lambda c, s: not c.section.trained_online,
        "MADPO learns from preference_num_candidates joint candidates of a task",
    ),
    Idle(
        "<algo>.replay <algo>.replay_rounds <algo>.replay_lambda <algo>.refit_below",
        lambda c, s: getattr(c.section, "num_iterations", None) == 1,
        "num_iterations=1: there is one round",
    ),
    Idle(
        "<algo>.replay_rounds",
        lambda c, s: getattr(c.section, "replay", None) in ("current", "all"),
        "only replay=last_k and lambda_decay read it",
    ),
    Idle(
        "<algo>.replay_lambda",
        lambda c, s: getattr(c.section, "replay", "lambda_decay") != "lambda_decay",
        "only replay=lambda_decay reads it",
    ),
    Idle(
        "<algo>.preference_num_candidates <algo>.comparator",
        lambda c, s: getattr(c.section, "preferences", None) is not None,
        "candidates are read from <algo>.preferences",
    ),
    Idle(
        "<algo>.preference_num_candidates <algo>.preference_pairs_per_sample "
        "<algo>.pair_selection <algo>.preference_holdout <algo>.preferences <algo>.comparator "
        "<algo>.reward_model_name <algo>.reward_learning_rate <algo>.reward_num_train_epochs "
        "<algo>.reward_train_batch_size <algo>.reward_max_length <algo>.reward_margin "
        "<algo>.reward_prompts "
        "<algo>.reward_freeze_backbone",
        lambda c, s: getattr(c.section, "reward_model", None) is not None,
        "the reward model is read from marlhf.reward_model",
    ),
    Idle(
        "magrpo",
        lambda c, s: c.section.fits_reward_model and c.online_name != "magrpo",
        "marlhf.rl_algorithm=ppo reads the section `ppo`",
    ),
    Idle(
        "ppo",
        lambda c, s: c.section.fits_reward_model and c.online_name != "ppo",
        "only marlhf.rl_algorithm=ppo reads it",
    ),
    Idle("<algo>.shared_policy", lambda c, s: s.num_agents == 1, "one agent has one policy"),
    Idle("<algo>.kl_in", lambda c, s: s.kl_coef == 0, "kl_coef=0: no KL is paid"),
    Idle(
        "<algo>.kl_horizon",
        lambda c, s: getattr(s, "kl_target", None) is None,
        "kl_coef is fixed without kl_target",
    ),
    Idle(
        "<algo>.target_kl",
        lambda c, s: getattr(s, "ppo_epochs", None) == 1,
        "ppo_epochs=1 leaves no epoch to end early",
    ),
    Idle(
        "<algo>.clip_range <algo>.value_clip_range",
        lambda c, s: getattr(s, "ppo_epochs", None) == 1 and s.train_batch_size is None,
        "the only update of a step is that of the policy that sampled: its ratio is 1",
    ),
    Idle(
        "<algo>.clip_range",
        lambda c, s: not s.takes_ratios,
        "update_epochs=1: each sample is used once, without a ratio",
    ),
    Idle(
        "generation.max_kept",
        lambda c, s: not (c.section.trained_online and sampling(c).truncates),
        "no log-probability is over what top_p or top_k leave",
    ),
    Idle(
        "generation.vllm_url generation.vllm_patience generation.importance_cap",
        lambda c, s: c.generation.backend != "vllm",
        "no server is asked unless generation.backend=vllm",
    ),
    Idle(
        "generation.importance_cap",
        lambda c, s: c.generation.backend == "vllm" and not c.section.trained_online,
        "learning from preferences does not ask how likely they were drawn",
    ),
    Idle(
        "generation.max_batch_tokens",
        lambda c, s: c.generation.backend == "vllm",
        "the server forms the batches",
    ),
    Idle("agent_model.name", lambda c, s: c.agents is not None, "agents names every model"),
    *(
        Idle(
            f"agent_model.{key}",
            lambda c, s, key=key: getattr(c.section, key) is not None,  # type: ignore[misc]
            f"the algorithm's own {key} is taken",
        )
        for key in ("temperature", "top_p", "top_k")
    ),
)


def without_effect(config: Config, given: Mapping[str, str]) -> list[str]:
    """One line for each reason, with the settings that were said in vain.

    ``given``: key → where it was said.
    """
    lines, told = [], set()
    section = config.online
    for row in TABLE:
        if not row.when(config, section):
            continue
        keys = dict.fromkeys(_keys(config, row))
        said = [key for key in keys if key in given and key not in told]
        said = [key for key in said if _value(config, key) != _default(config, key)]
        told |= set(said)
        if said:
            values = ", ".join(f"{key}={_value(config, key)}" for key in said)
            verb = "has" if len(said) == 1 else "have"
            lines.append(f"{values} {verb} no effect: {row.because}")
    if section.num_turns == 1 and REVISION in config.prompts:
        lines.append("prompts.revision has no effect: nothing follows a single turn")
    return [line.replace("<algo>", config.algorithm) for line in lines]


def _by_token(section: Any) -> bool:
    """PPO's values are of tokens or of turns; SHPPO's are of turns."""
    return getattr(section, "granularity", None) == "token"


def _keys(config: Config, row: Idle) -> Iterator[str]:
    """The dotted keys of a row, in every section that the run reads."""
    for pattern in row.keys.split():
        heads = dict.fromkeys((config.algorithm, config.online_name))
        for key in [pattern.replace("<algo>", head) for head in heads]:
            head, _, name = key.partition(".")
            names = [f.name for f in fields(_class(head))]
            yield from (f"{head}.{n}" for n in names if n == name or not name)


def _class(section: str) -> Any:
    return SHARED.get(section) or SECTIONS[section]


def _value(config: Config, key: str) -> Any:
    head, _, name = key.partition(".")
    return getattr(config.sections.get(head) or getattr(config, head), name)


def _default(config: Config, key: str) -> Any:
    head, _, name = key.partition(".")
    if key == "external.mode" and config.external.mode is not None:  # null means one of them
        unsaid = replace(config, external=replace(config.external, mode=None))
        return with_mode(unsaid, load_prompts(config)).mode
    return getattr(_class(head)(), name)
