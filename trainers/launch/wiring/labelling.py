"""Builds the collector of a run's preferences, and the comparator that labels them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from comlrl.config.algorithms import PreferenceConfig
from comlrl.config.resolved import Config
from comlrl.errors import UserError

if TYPE_CHECKING:
    from comlrl.preferences.collector import Collector
    from comlrl.preferences.comparing import Comparator
    from comlrl.tasks.prompts import Prompts
    from external.comparator import Judge
    from trainers.launch.wiring.assembly import Run


def build_collector(run: Run[PreferenceConfig]) -> Collector:
    from comlrl.preferences.collector import Collector
    from comlrl.rollout.grow import Rollout

    assert isinstance(run.rollout, Rollout), "check_program refuses others"
    return Collector(
        run.section,
        run.rollout,
        run.loop,
        run.sampling.with_sets(None),  # preferences are of the whole policies
        run.loop.schedule.tasks_of,
        seed=run.config.seed,
        resume=run.resume,
        comparator=_comparator(run),
    )


def _comparator(run: Run[PreferenceConfig]) -> Comparator | None:
    """What the configuration names; None: the task reward. Raises UserError."""
    match run.section.comparison:
        case ("model", _):
            return build_judge(run.config, run.work.prompts)
        case ("earlier", folder):
            return _earlier(run, folder)
    return None


def build_judge(config: Config, prompts: Prompts) -> Judge:
    """Raises UserError where its service or its key is not known."""
    from external.comparator import Judge, judge_of
    from external.service import Service

    assert config.section.rounds is not None
    key, (_, given) = f"{config.algorithm}.comparator", config.section.rounds.comparison
    try:
        model, provider = judge_of(given)
    except UserError as error:
        raise UserError(
            f"{key}: no provider is known for model '{given}'; give its service's address, "
            "http://…, with the model's name after a #"
        ) from error
    return Judge(prompts, Service(model, provider, f"{key}: 'model: {given}'"))


def _earlier(run: Run[PreferenceConfig], folder: str) -> Comparator:
    from comlrl.preferences.comparing import EarlierTeam
    from trainers.launch.wiring.assembly import build_rollout
    from trainers.launch.wiring.load import load_sampler

    try:
        sampler = load_sampler(folder)
    except UserError as error:
        raise UserError(f"{run.config.algorithm}.comparator: 'earlier: {folder}': {error}") from (
            error
        )
    rollout = build_rollout(run.config, run.work, sampler, run.rollout.reward)
    return EarlierTeam(
        rollout, run.sampling, replace(run.section.candidate_shape, joint_mode="align")
    )
