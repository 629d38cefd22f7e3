"""Train a team with MARLHF: python train_marlhf.py --config configs/marlhf_quickstart.yaml"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from comlrl.config.algorithms import MAGRPOConfig, MARLHFConfig, PPOConfig
from comlrl.loop.parts import Algorithm, Trainer
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring import assembly
from comlrl.trainers.launch.wiring.assembly import Run

if TYPE_CHECKING:
    from comlrl.preferences.reward_model import ModelReward
    from comlrl.preferences.reward_training import RewardBase


def build(run: Run[MARLHFConfig]) -> Trainer:
    from comlrl.preferences.reward_model import ModelReward
    from comlrl.trainers.marlhf import MARLHFTrainer

    reward = ModelReward(run.reward, run.rollout.prompts)
    return MARLHFTrainer(
        run.section,
        run.loop,
        assembly.build_collector(run),
        reward,
        online_trainer(run, reward),
        reward_base(run),
        seed=run.config.seed,
        resume=run.resume,
    )


def online_trainer(run: Run[MARLHFConfig], reward: ModelReward) -> Algorithm[Any]:
    """Return the trainer that ``rl_algorithm`` names, on a rollout scored by the reward model."""
    from comlrl.trainers.magrpo import MAGRPOTrainer
    from comlrl.trainers.ppo import PPOTrainer

    section = run.config.online
    rollout = assembly.build_player(run.config, run.work, run.rollout.sampler, reward)
    if run.section.learns_by == "ppo":
        ppo = cast("PPOConfig", section)
        critics = assembly.build_critic_team(run.config, ppo, run.team)
        return PPOTrainer(ppo, run.team, rollout, run.loop, run.sampling, critic_team=critics)
    magrpo = cast("MAGRPOConfig", section)
    return MAGRPOTrainer(magrpo, run.team, rollout, run.loop, run.sampling)


def reward_base(run: Run[MARLHFConfig]) -> RewardBase:
    """Return the reward model's base: ``reward_model_name``, or the last agent's base."""
    from comlrl.preferences.reward_training import RewardBase

    config, last = run.config, run.team.agents[-1]
    agent_base = config.agent_models[-1]
    name = run.section.reward_model_name or agent_base
    same = name == agent_base
    lora = config.lora
    return RewardBase(
        name=name,
        dtype=last.model.dtype,
        device=str(last.device),
        lora={
            "r": lora.r,
            "lora_alpha": lora.effective_alpha,
            "lora_dropout": lora.dropout,
            "target_modules": lora.target_modules,
        }
        if lora.enabled
        else None,
        freeze_backbone=run.section.reward_freeze_backbone,
        tokenizer_kwargs=config.agent_model.tokenizer_kwargs if same else {},
        model_kwargs=config.agent_model.model_kwargs if same else {},
    )


if __name__ == "__main__":
    sys.exit(main("marlhf", build))
