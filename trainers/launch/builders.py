"""What each algorithm's trainer is built from: an assembled run → a trainer.

One function an algorithm, for its train script and for the ``comlrl`` command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comlrl.types import Trainer
from trainers.launch.assembly import Run, build_critic_team, build_rollout, heterogeneous_policy
from trainers.launch.labelling import build_collector

if TYPE_CHECKING:
    from comlrl.preferences.reward_model import ModelReward
    from trainers.marlhf import Online


def grpo(run: Run) -> Trainer:
    from trainers.grpo import GRPOTrainer

    return GRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling)


def magrpo(run: Run) -> Trainer:
    from trainers.magrpo import MAGRPOTrainer

    return MAGRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling)


def madpo(run: Run) -> Trainer:
    from trainers.madpo import MADPOTrainer

    return MADPOTrainer(run.section, run.team, run.loop, run.sampling, build_collector(run))


def marlhf(run: Run) -> Trainer:
    from comlrl.preferences.reward_model import ModelReward
    from trainers.marlhf import MARLHFTrainer

    reward = ModelReward(run.reward, run.rollout.prompts)
    return MARLHFTrainer(
        run.section,
        run.loop,
        build_collector(run),
        reward,
        online_trainer(run, reward),
        reward_base(run),
        seed=run.config.seed,
        resume=run.resume,
    )


def ppo(run: Run) -> Trainer:
    from trainers.ppo import PPOTrainer

    critics = build_critic_team(run.config, run.team)
    return PPOTrainer(
        run.section, run.team, run.rollout, run.loop, run.sampling, critic_team=critics
    )


def shppo(run: Run) -> Trainer:
    from trainers.shppo import SHPPOTrainer

    policy = heterogeneous_policy(run.rollout.sampler)
    assert policy is not None, "SHPPO's section has one"
    return SHPPOTrainer(run.section, run.team, policy, run.rollout, run.loop, run.sampling)


def online_trainer(run: Run, reward: ModelReward) -> Online:
    """The sibling that ``rl_algorithm`` names, on a rollout scored by the reward model."""
    from trainers.configs import online_section
    from trainers.magrpo import MAGRPOTrainer
    from trainers.ppo import PPOTrainer

    section = online_section(run.config)
    rollout = build_rollout(run.config, run.generator, reward)
    made = (section, run.team, rollout, run.loop, run.sampling)
    if not section.chains:
        return MAGRPOTrainer(*made)
    return PPOTrainer(*made, critic_team=build_critic_team(run.config, run.team))


def reward_base(run: Run) -> Any:
    """What the reward model starts from: ``reward_model_name``, or the last agent's base."""
    from comlrl.preferences.reward_training import RewardBase

    config, last = run.config, run.team.agents[-1]
    own = config.agents[-1] if config.agents is not None else config.agent_model.name
    name = run.section.reward_model_name or own
    same = name == own
    lora = config.lora
    return RewardBase(
        name,
        last.model.dtype,
        str(last.device),
        {
            "r": lora.r,
            "lora_alpha": 2 * lora.r if lora.alpha is None else lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": lora.target_modules,
        }
        if lora.enabled
        else None,
        run.section.reward_freeze_backbone,
        config.agent_model.tokenizer_kwargs if same else {},
        config.agent_model.model_kwargs if same else {},
    )


BUILDERS = {make.__name__: make for make in (grpo, magrpo, madpo, marlhf, ppo, shppo)}
