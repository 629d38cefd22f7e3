"""The rollout that plays a program: turns tasks into groups of episodes, with ``Rollout``'s API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from comlrl.files import raise_open_limit
from comlrl.programs.program import Program
from comlrl.programs.runner import EpisodeRunner
from comlrl.programs.running import RolloutSettings
from comlrl.programs.served import weighted
from comlrl.tasks.prompts import Prompts
from comlrl.types import (
    EpisodeGroup,
    Reward,
    Sampler,
    Sampling,
    ServedSampler,
    Shape,
    Task,
)


class ProgramRollout:
    """Plays a program. Holds no state between calls."""

    returns_by_agent = True  # an episode may pay each agent differently

    def __init__(
        self,
        program: Program,
        sampler: Sampler,
        reward: Reward,
        prompts: Prompts,
        *,
        seed: int,
        process: Callable[[float], float] = lambda reward: reward,
        own_rewards: bool = True,
    ) -> None:
        """Initialize the rollout.

        ``reward`` and ``prompts`` serve ``agents.score`` and ``agents.prompts``. ``process`` is the
        reward processor. With ``own_rewards``, agents learn from ``Score.by_agent`` where a score
        sets it, instead of the team's value.
        """
        raise_open_limit()  # episodes open sockets and processes
        self.program, self.sampler, self.reward, self.prompts = program, sampler, reward, prompts
        self.seed, self.process, self.own_rewards = seed, process, own_rewards

    def grow(
        self,
        tasks: Sequence[Task],
        shape: Shape,
        sampling: Sampling,
        key: tuple,
        greedy_discount: float | None = None,
    ) -> list[EpisodeGroup]:
        """Play ``shape.num_generations`` episodes of each task, in parallel.

        ``key`` (phase, training step) is part of every sample's random key. Raises TargetError if
        the program raises an error.
        """
        groups = self.grow_each(tasks, shape, sampling, [key] * len(tasks))
        if greedy_discount is None:
            return groups
        keys = [(*key, "greedy")] * len(tasks)
        greedy = self.grow_each(tasks, shape.chain, sampling.greedy, keys)
        return [
            replace(group, greedy=played.episodes_G[0])
            for group, played in zip(groups, greedy, strict=True)
        ]

    def grow_each(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, keys: Sequence[tuple]
    ) -> list[EpisodeGroup]:
        """Grow groups as ``grow`` does, with one key per group, so tasks may be repeated."""
        settings = RolloutSettings(
            program=self.program,
            sampler=self.sampler,
            reward=self.reward,
            prompts=self.prompts,
            sampling=sampling,
            seed=self.seed,
            process=self.process,
            own_rewards=self.own_rewards,
        )
        episodes_BG = EpisodeRunner(settings).play(tasks, keys, shape.num_generations)
        if isinstance(self.sampler, ServedSampler):
            agents = len(self.program.names_N)
            episodes_BG = weighted(self.sampler, episodes_BG, sampling, agents)
        return [
            EpisodeGroup(task, self.program.names_N, tuple(episodes_G))
            for task, episodes_G in zip(tasks, episodes_BG, strict=True)
        ]
