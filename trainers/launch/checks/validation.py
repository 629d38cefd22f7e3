"""The checks of a configuration that need no model: invalid settings, and ones without effect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from comlrl.config.resolved import Config
from comlrl.config.sections import SECTIONS as SHARED
from comlrl.config.unused import without_effect
from comlrl.tasks.prompts import PREFILL, REVISION
from comlrl.trainers.launch.wiring import sampling_settings, vllm
from comlrl.trainers.launch.wiring.resolved_work import Work, resolve_work


def validate(config: Config) -> Work:
    """Return the run's work, whose roles can be passed to ``Config.with_roles``. Raises UserError
    for values that cannot be combined."""
    config.check()
    vllm.refuse(config)
    work = resolve_work(config)
    config = config.with_roles(work.roles)
    sampling_settings.check(config, work.roles)
    vllm.check_addresses(config.generation, config.model_names, work.roles)
    return work


def notices(config: Config, work: Work, set_keys: Collection[str]) -> list[str]:
    """Return a notice for each reason why settings have no effect, and for a shift without
    baseline.

    ``set_keys``: the dotted keys that a file, a flag or an override has set.
    """
    lines = []
    if config.online.baseline == "raw" and config.shift:
        lines.append(
            f"reward_processor.shift={config.shift:g} with advantage=raw, which has no baseline: "
            "every completion is pushed by it, whatever its reward"
        )
    if config.external.mode == work.default_mode:  # equals the default, null
        set_keys = set(set_keys) - {"external.mode"}
    shared = {n: s for n in SHARED if (s := getattr(config, n)) is not None}
    read = {config.algorithm: config.section, config.online_name: config.online}
    sections = {**shared, **config.sections, **read}
    why = f"{config.algorithm} learns by the section `{config.online_name}`"
    unread = dict.fromkeys(config.sections.keys() - read.keys(), why)
    if not work.reward_arguments.keys() & {f.name for f in fields(config.sandbox)}:
        unread["sandbox"] = "this reward runs nothing in it"
    if not work.rewards_each and work.program is None:
        unread["reward.by_agent"] = "this reward returns one value for all agents"
    if config.online.num_turns > 1 and "sandbox_slice" not in work.mode.keys_read:
        unread["external.sandbox_slice"] = "this external.mode does not read it"
    sampling = sampling_settings.sampling(config, work.roles)
    truncates = any(sampling.for_agent(i).truncates for i in range(len(work.roles)))
    if not (config.section.trained_online and truncates):
        unread["generation.max_support"] = "no log-probability is over what top_p or top_k leave"
    lines += without_effect(config, sections, set_keys, unread)
    if config.online.num_turns == 1 and REVISION in config.prompts:
        lines.append("prompts.revision has no effect: nothing follows a single turn")
    if work.program is not None and PREFILL in config.prompts:
        lines.append("prompts.prefill has no effect: the program writes how its prompts end")
    return lines
