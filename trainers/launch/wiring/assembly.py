"""Assembles the parts that a trainer is built from, given the configuration and tasks.

Packages that load torch are imported inside functions, so that bad settings are refused first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from comlrl.config.algorithms import CommonConfig, PPOConfig, PreferenceConfig
from comlrl.config.resolved import Config
from comlrl.config.sections import AgentConfig
from comlrl.errors import UserError, print_error
from comlrl.run_files import API
from comlrl.trainers.launch.wiring import api, vllm
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.trainers.launch.wiring.sampling_settings import evaluated, sampling
from comlrl.trainers.launch.wiring.task_splits import fitting, token_bound

if TYPE_CHECKING:
    from comlrl.external.expert_edits import Fallbacks
    from comlrl.loop.best_model import BestModel
    from comlrl.loop.evaluations import Evaluations
    from comlrl.loop.interrupts import Signals
    from comlrl.loop.loop import Loop
    from comlrl.loop.parts import Player
    from comlrl.loop.progress import Progress
    from comlrl.loop.records import Logger
    from comlrl.loop.resume import Start
    from comlrl.loop.task_schedule import TaskSchedule
    from comlrl.models.agent import Agent
    from comlrl.models.latent_networks import HeterogeneousPolicy
    from comlrl.models.prompt_encoder import PromptEncoder
    from comlrl.models.team import Team
    from comlrl.preferences.collector import Collector
    from comlrl.programs.rollout import ProgramRollout
    from comlrl.rollout.generation import Generator
    from comlrl.rollout.grow import Rollout
    from comlrl.rollout.latent_sampler import LatentSampler
    from comlrl.rollout.overlap import OverlappedRollout
    from comlrl.types import Reward, RolloutResult, Sampler, Sampling, Task


Section = TypeVar("Section", bound=CommonConfig, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Run(Generic[Section]):
    """The parts that a trainer is built from."""

    config: Config  # the whole configuration, resolved
    work: Work  # domain, prompts and reward
    section: Section  # the algorithm's settings
    run_dir: Path
    team: Team  # the agents' models
    reward: Reward
    rollout: Player  # samples and scores the tasks of a step
    loop: Loop  # steps, metrics, evaluations and checkpoints
    sampling: Sampling
    resume: bool  # whether run_dir holds an earlier part of this run, which continues
    save: Callable[[Path], None]  # writes the agents into a folder; a collective call


def assemble(
    start: Start,
    work: Work,
    signals: Signals,
    train: list[Task],
    held_out: list[Task],
    opened: ExitStack,
) -> Run[CommonConfig]:
    """Load models, start the reward's workers lazily, and connect the packages' objects.

    ``opened``: receives the callbacks that close them.
    """
    from comlrl import loggers
    from comlrl.external.expert_edits import Fallbacks
    from comlrl.loop.best_model import BestModel
    from comlrl.loop.loop import Loop
    from comlrl.loop.progress import Progress
    from comlrl.loop.run_log import RunLog
    from comlrl.processes import distributed

    config, section, run_dir = start.config, start.config.section, start.run_dir
    team, generator, inner = build_agents(start)
    services = api.members(config.agents, run_dir / API)
    sampler = api.mixed(inner, services)
    sampled, measured = sampling(config, work.roles), evaluated(config, work.roles)
    work = work.read_by(encoders(config.team, team))
    reading = (work, config.dataset, sampler.encode, inner.max_length)
    train = fitting(train, *reading, sampled)
    held_out = fitting(held_out, *reading, measured) if held_out else []
    reward, measuring = build_rewards(work)
    opened.callback(_close, reward)
    fallbacks = Fallbacks() if config.external.mode == "expert_edits" else None
    server, corrected = None, None
    if config.generation.backend == "vllm":
        from comlrl.rollout.vllm.sampler import VLLMSampler
        from comlrl.update.importance import ImportanceWeightedSampler

        servers_N = vllm.servers(
            config.generation,
            config.model_names,
            work.roles,
            lambda: signals.received is not None,  # after a signal, do not wait long for a server
        )
        server = VLLMSampler(team, servers_N, run_dir / "vllm", inner.max_length, sampled)
        opened.callback(server.close)
        if section.trained_online:
            cap = config.generation.importance_cap
            corrected = ImportanceWeightedSampler(team, server, cap)
    rollout = build_player(config, work, corrected or server or sampler, reward, fallbacks)
    ahead, prefetch = None, None
    if config.generation.overlap:
        ahead = vllm.overlapped(rollout, server, corrected, work, fallbacks)
        prefetch = vllm.prefetch(ahead)
        opened.callback(ahead.close)
    learned = sampled.with_sets(config.generation.max_support)
    playing = build_player(config, work, server or sampler, measuring, fallbacks)
    progress, logger, save = Progress(), loggers.Loggers([]), saver(team, inner)
    if distributed.is_main():
        resume = start.checkpoint is not None
        logger = loggers.build(config, work.domain, work.roles, run_dir, progress, resume=resume)
        opened.callback(_close, logger)
    best = BestModel(run_dir, save) if config.output.save_best else None
    evaluations = None
    if held_out:
        evaluations = build_evaluations(
            section, playing, held_out, measured, generator, progress, best, ahead
        )

    def standing() -> dict[str, float]:
        """Return the metrics of every record: how often ``plain`` answered instead of an expert,
        and the services' usage since the last record."""
        counts = api.metrics(services)
        if fallbacks is not None:
            counts["expert_fallbacks"] = fallbacks.count
        return {name: distributed.total(count) for name, count in counts.items()}

    loop = Loop(
        section,
        build_schedule(section, train, config.seed),
        run_dir,
        RunLog(logger, work.domain, standing, corrected),
        evaluations=evaluations,
        signals=signals,
        progress=progress,
        prefetch=prefetch,
        cost=token_bound(work, sampler.encode, section.shape, sampled),
    )
    return Run(
        config=config,
        work=work,
        section=section,
        run_dir=run_dir,
        team=team,
        reward=reward,
        rollout=ahead or rollout,
        loop=loop,
        sampling=learned,
        resume=start.continuing,
        save=save,
    )


def _close(closed: Logger | Reward) -> None:
    try:
        closed.close()
    except (OSError, UserError) as error:  # must not hide the error that ended the run
        print_error(str(error))


def encoders(agents: Sequence[AgentConfig], team: Team) -> list[PromptEncoder | None]:
    """Return each agent's prompt encoder; None if a service plays the agent."""
    return [None if a.api is not None else team.actor(i).encoder for i, a in enumerate(agents)]


def build_agents(start: Start) -> tuple[Team, Generator, Generator | LatentSampler]:
    """Build the team with its initial weights, its generator, and its sampler."""
    from comlrl.models.pretrained import build_team
    from comlrl.trainers.launch.wiring import init_from

    config = start.config
    reference = any(s.needs_reference for s in config.sections.values())
    team = build_team(config, reference=reference)
    if config.distributed.strategy == "fsdp":
        team.split()
    generator, sampler = build_sampler(config, team)
    untrained = len(team.trained) < len(team)  # checkpoints lack untrained agents
    if config.init_from is not None and (start.checkpoint is None or untrained):
        init_from.begin(config, team, sampler)
    return team, generator, sampler


def build_critic_team(config: Config, section: PPOConfig, team: Team) -> Team | None:
    """Return the ``critic_model`` language models, one per critic; None if the key is not set.

    Raises UserError if the model cannot be loaded, or lacks the agents' tokenizer where it values
    tokens.
    """
    import torch

    from comlrl.models.pretrained import default_device, load_encoder, load_team

    if section.critic_model is None:
        return None
    key, name = f"{config.online_name}.critic_model", section.critic_model
    if config.agent_model.chat is True:
        load_encoder(config.agent_model, name, key)  # raises if there is no chat template
    torch.manual_seed(config.seed)
    critics = load_team(
        config.agent_model,
        (config.lora,) * section.critics,
        (name,) * section.critics,
        shares_base=config.lora.enabled,
        devices=(default_device(),) * section.critics,
        key=key,
    )
    read = _words(critics.agents[0])
    if section.granularity == "token" and any(_words(agent) != read for agent in team.agents):
        raise UserError(
            f"{key}: '{name}' uses another tokenizer than the agents, whose tokens it values; use "
            f"a model with their tokenizer, or set {config.online_name}.granularity=turn"
        )
    return critics


def _words(agent: Agent) -> dict[str, int]:
    """Return the vocabulary of an agent's tokenizer, without special tokens."""
    special = set(agent.tokenizer.all_special_tokens)
    return {word: i for word, i in agent.tokenizer.get_vocab().items() if word not in special}


def build_schedule(section: CommonConfig, tasks: Sequence[Any], seed: int) -> TaskSchedule:
    """Return a schedule of shuffled epochs; for preferences, of rounds over parts of the tasks."""
    from comlrl.loop.task_schedule import TaskSchedule

    schedule = TaskSchedule(tasks, section.batch_size, section.num_train_epochs, seed)
    if section.rounds is None:
        return schedule
    return replace(
        schedule,
        rounds=section.rounds.number,
        round_tasks=section.rounds.tasks,
        max_steps=section.max_steps,
    )


def saver(team: Team, sampler: Sampler) -> Callable[[Path], None]:
    """Return a function that writes the agents' models, and SHPPO's networks, into a folder."""
    from comlrl.processes import distributed

    policy = heterogeneous_policy(sampler)

    def save(folder: Path) -> None:
        team.save(folder)
        if distributed.is_main() and policy is not None:
            policy.save(folder)

    return save


def heterogeneous_policy(sampler: Sampler) -> HeterogeneousPolicy | None:
    """Return the networks by which SHPPO's shared model acts for all agents; None if absent."""
    from comlrl.rollout.latent_sampler import LatentSampler

    return sampler.policy if isinstance(sampler, LatentSampler) else None


def build_sampler(config: Config, team: Team) -> tuple[Generator, Generator | LatentSampler]:
    """Build the generator and the agents' sampler, which is the generator itself, or with SHPPO a
    sampler that first draws the latents.

    SHPPO's sampler supports any number of agents; its weights are ``sampler.policy``.
    """
    import torch

    from comlrl.rollout.generation import Generator

    networks = config.section.networks
    length = config.context_length(min(agent.context_length for agent in team.agents))
    if networks is None:
        slots, decoding = config.generation.max_batch_tokens, config.generation.decoding
        generator = Generator(team, slots, length, decoding=decoding)
        return generator, generator
    from comlrl.models.critics import hidden_width
    from comlrl.models.latent_networks import HeterogeneousPolicy
    from comlrl.rollout.latent_sampler import LatentSampler

    agent = team.agents[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = HeterogeneousPolicy(
            hidden_width(agent),
            networks.latent_dim,
            networks.latent_hidden,
            networks.heterogeneous_rank,
            networks.latents,
        ).to(agent.device)
    generator = Generator(team, config.generation.max_batch_tokens, length, policy.layer)
    return generator, LatentSampler(policy, generator)


def build_rewards(work: Work) -> tuple[Reward, Reward]:
    """Build the rewards of training and of evaluation. They share workers, so closing one closes
    both."""
    reward = work.build_reward()
    return reward, reward.for_evaluation()


def build_player(
    config: Config,
    work: Work,
    sampler: Any,
    reward: Reward,
    fallbacks: Fallbacks | None = None,
) -> Rollout | ProgramRollout:
    """Build the rollout: it plays the run's program, or grows trees if there is none."""
    from comlrl.programs.rollout import ProgramRollout
    from comlrl.rollout.grow import Rollout
    from comlrl.rollout.reading import History

    if work.program is not None:
        return ProgramRollout(
            work.program,
            sampler,
            reward,
            work.prompts,
            seed=config.seed,
            process=config.reward_processor.process,
            own_rewards=config.reward.by_agent == "own",
        )
    external, transition = config.external, work.mode.build(work.prompts, fallbacks)
    return Rollout(
        sampler,
        reward,
        transition,
        work.prompts,
        seed=config.seed,
        history=History(external.history, external.original_prompt, external.previous_response),
        process=config.reward_processor.process,
        own_rewards=work.own_rewards,
    )


def build_collector(run: Run[PreferenceConfig]) -> Collector:
    """Build the collector of a run's preferences."""
    from comlrl.preferences.collector import Collector
    from comlrl.rollout.grow import Rollout

    assert isinstance(run.rollout, Rollout), "check_program refuses others"
    return Collector(
        run.section,
        run.rollout,
        run.loop,
        run.sampling.with_sets(None),  # log π of pairs is over the full vocabulary
        run.loop.schedule.tasks_of,
        seed=run.config.seed,
        resume=run.resume,
    )


def build_evaluations(
    section: CommonConfig,
    rollout: Rollout | ProgramRollout,
    tasks: list[Task],
    sampling: Sampling,
    generator: Generator,
    progress: Progress,
    best: BestModel | None,
    ahead: OverlappedRollout | None = None,
) -> Evaluations:
    """Build the evaluations of the current policy on held-out tasks. Metric names have a
    ``turn_1/…`` prefix or none.

    ``progress`` receives the generator's progress. An evaluation waits for ``ahead``, which uses
    the reward too.
    """
    from comlrl.evaluation.estimates import evaluate, pass_rates
    from comlrl.evaluation.metrics import tree_metrics
    from comlrl.loop.cadence import Cadence
    from comlrl.loop.evaluations import Evaluations
    from comlrl.loop.progress import Written
    from comlrl.processes import distributed

    domain = rollout.prompts.domain
    of_task = section.eval_answers * section.num_turns * section.num_agents
    completions = len(distributed.shard(tasks)) * of_task
    ks = sorted({1, section.eval_answers})

    def run() -> tuple[list[RolloutResult], dict[str, float]]:
        if ahead is not None:
            ahead.wait()
        before, generator.on_written = generator.on_written, Written(progress, completions)
        try:
            trees = evaluate(
                rollout,
                tasks,
                section.shape,
                sampling,
                section.eval_answers,
            )
        finally:
            generator.on_written = before
        return trees, tree_metrics(trees, domain) | pass_rates(trees, ks)

    return Evaluations(run, Cadence(section.eval_interval), best)
