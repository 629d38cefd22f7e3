"""``generation.backend: vllm``: what a server cannot do, whether it is there, and its client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from comlrl.builtin import MODELS
from comlrl.config.resolved import Config
from comlrl.errors import UserError, notice
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from comlrl.trainers.launch.wiring.vllm_urls import urls

if TYPE_CHECKING:
    from comlrl.external.expert_edits import Fallbacks
    from comlrl.loop.steps import Step
    from comlrl.models.team import Team
    from comlrl.processes.distributed import Processes
    from comlrl.programs.rollout import ProgramRollout
    from comlrl.rollout.grow import Rollout
    from comlrl.rollout.overlap import OverlappedRollout
    from comlrl.rollout.vllm.sampler import VLLMSampler
    from comlrl.rollout.vllm.server import Server
    from comlrl.rollout.vllm.servers import Servers
    from comlrl.trainers.launch.wiring.resolved_work import Work
    from comlrl.types import Sampling
    from comlrl.update.importance import ImportanceWeightedSampler


def refuse(config: Config) -> None:
    """Raise UserError for what a server, which holds one model and adapters on it, cannot
    sample for."""
    generation, section = config.generation, config.online
    if generation.backend != "vllm":
        if generation.overlap:
            raise UserError(
                f"generation.overlap: 1 with generation.backend={generation.backend}, which "
                "samples by the very weights that an update moves; give 0, or "
                "generation.backend=vllm"
            )
        return
    if generation.overlap and config.section.rounds is not None:
        raise UserError(
            f"generation.overlap: 1 with {config.algorithm}, which samples in rounds: what comes "
            "next is not known while a step updates; give 0"
        )
    section = config.section
    key = "eval_interval" if section.save_steps is None else "save_steps"
    if generation.overlap and getattr(section, key) == 1:
        raise UserError(
            f"generation.overlap: 1 with {config.algorithm}.{key}=1: a step after a checkpoint is "
            "not sampled beforehand; give save_steps above 1, or overlap 0"
        )
    backend = "generation.backend=vllm"
    if section.heterogeneous:
        raise UserError(
            f"{backend} with {config.algorithm}, whose agents differ by a layer before the "
            "language-model head, which no server has; give builtin"
        )
    if not config.lora.enabled:
        raise UserError(
            f"lora.enabled: false with {backend}, to which adapters are sent after an update, not "
            "whole models; give true, or generation.backend=builtin"
        )
    given = config.lora.target_modules
    if not isinstance(given, str) and any(name.endswith("lm_head") for name in given):
        raise UserError(
            f"lora.target_modules: {list(given)} with {backend}, which serves no adapter on the "
            "language-model head; leave lm_head out, or give generation.backend=builtin"
        )


def check(config: Config, roles: Sequence[str]) -> None:
    """Raise UserError where a server is to sample, and does not answer, has another agent's
    model or does not return what truncation leaves."""
    if config.generation.backend != "vllm":
        return
    drawn = sampling(config, roles)
    for index, own in enumerate(servers(config, roles)):
        model = config.model_names[index]
        for server in own.members:
            base, _ = server.check()
            if base != model and base in config.model_names:
                raise UserError(
                    f"generation.vllm_url: '{server.url}' has the model '{base}', and is given for "
                    f"'{model}'; give each model its own servers"
                )
            if _last(base) != _last(str(MODELS.get(model, model))):
                notice(
                    f"generation.vllm_url: '{server.url}' has the model '{base}', and '{model}' is "
                    "trained; if they differ, importance/ratio_max is far above 1"
                )
            if drawn.of(index).truncates:
                _check_replay(server, base, drawn.of(index))


def _last(model: str) -> str:
    """Return the last part of a model's name or folder."""
    return PurePath(model).name


def _check_replay(server: Server, base: str, sampling: Sampling) -> None:
    """Raise UserError where the policy that acts could not be trained."""
    truncating = {"top_k": sampling.top_k, "top_p": sampling.top_p}
    key, value = next((key, value) for key, value in truncating.items() if value is not None)
    try:
        server.check_replay(base)
    except UserError as error:
        raise UserError(
            f"{key}: {value:g} with generation.backend=vllm, and {error}, or give {key}=null or "
            "generation.backend=builtin"
        ) from error


def build(
    config: Config,
    roles: Sequence[str],
    team: Team,
    run_dir: Path,
    max_length: int,
    sampled: Sampling,
    ending: Callable[[], bool],
) -> tuple[VLLMSampler | None, ImportanceWeightedSampler | None]:
    """Build the client of the servers that sample in the generator's place, and, where the
    samples' policy is trained, the same with what corrects for it. ``ending``: whether the run
    was asked to end, which then does not wait long for a server."""
    if config.generation.backend == "builtin":
        return None, None
    from comlrl.processes import distributed
    from comlrl.rollout.vllm.sampler import VLLMSampler
    from comlrl.rollout.vllm.servers import Servers
    from comlrl.update.importance import ImportanceWeightedSampler

    own_N = servers(config, roles, ending)
    if team.processes.lock_step and not distributed.is_main():  # the first process asks for all
        own_N = (Servers((), config.generation.vllm_patience),) * len(own_N)
    engine = VLLMSampler(team, own_N, run_dir / "vllm", max_length, sampled)
    if not config.section.trained_online:
        return engine, None
    return engine, ImportanceWeightedSampler(team, engine, config.generation.importance_cap)


def overlapped(
    config: Config,
    rollout: Rollout | ProgramRollout,
    server: VLLMSampler | None,
    corrected: ImportanceWeightedSampler | None,
    work: Work,
    fallbacks: Fallbacks | None,
    processes: Processes,
) -> OverlappedRollout | None:
    """Wrap the rollout so that it may grow its next trees while models are updated; None: not
    configured."""
    if not config.generation.overlap:
        return None
    from comlrl.rollout.grow import Rollout
    from comlrl.rollout.lockstep import FromMain, SplitReward
    from comlrl.rollout.overlap import OverlappedRollout

    assert isinstance(rollout, Rollout), "check_program refuses others"
    assert server is not None and corrected is not None
    reward, transition = rollout.reward, rollout.transition
    if isinstance(reward, SplitReward):
        reward = reward.reward
    if isinstance(transition, FromMain):
        transition = transition.transition
    if fallbacks is None:
        return OverlappedRollout(
            rollout, server, reward, transition, corrected.weigh, processes=processes
        )
    ahead = type(fallbacks)()  # those of the step that is grown ahead, until it is logged
    transition = work.mode.build(work.prompts, ahead)

    def taken(used: bool) -> None:
        fallbacks.count += ahead.count if used else 0
        ahead.count = 0

    return OverlappedRollout(
        rollout, server, reward, transition, corrected.weigh, taken, processes=processes
    )


def prefetch(
    rollout: OverlappedRollout | None, processes: Processes
) -> Callable[[Step | None], None] | None:
    """Return what has the next step's trees grown beforehand; None: not configured."""
    if rollout is None:
        return None

    def begin(step: Step | None) -> None:
        if step is None:
            rollout.release()
        else:
            rollout.begin(processes.shard(step.tasks), step.key)

    return begin


def servers(
    config: Config, roles: Sequence[str], ending: Callable[[], bool] = lambda: False
) -> tuple[Servers, ...]:
    """Return the servers of each policy; one object for policies with the same servers."""
    from comlrl.rollout.vllm.servers import Servers

    given = urls(config.generation.vllm_url, config.model_names, roles)
    made: dict[tuple[str, ...], Servers] = {}
    for own in given:
        made.setdefault(own, Servers(own, config.generation.vllm_patience, ending=ending))
    return tuple(made[own] for own in given)
