"""Train a team with MARLHF: python train_marlhf.py --config configs/marlhf_quickstart.yaml"""

from __future__ import annotations

import sys
from typing import Any

from comlrl.launch import Run, Trainer, main


def build(run: Run) -> Trainer:
    from comlrl.collection import Collector
    from comlrl.generation import order, uniforms
    from comlrl.launch import build_rollout
    from comlrl.prompts import first_prompts
    from comlrl.reward_model import ModelReward
    from comlrl.team import resolve_model
    from trainers.marlhf import MARLHFTrainer

    config = run.config
    reward = ModelReward(run.reward, first_prompts)
    rollout = build_rollout(config, run.generator, reward, uniforms)
    collector = Collector(
        run.section,
        run.rollout,
        run.loop,
        run.sampling,
        order,
        seed=config.seed,
        resume=run.resume,
    )
    return MARLHFTrainer(
        run.section,
        run.loop,
        collector,
        reward,
        online_trainer(run, rollout),
        reward_base(run),
        resolve=resolve_model,
        seed=config.seed,
        resume=run.resume,
    )


def online_trainer(run: Run, rollout: Any) -> Any:
    """The sibling that ``rl_algorithm`` names, on a rollout scored by the reward model."""
    from loggers.metrics import tree_metrics
    from trainers.configs import online_section
    from trainers.magrpo import MAGRPOTrainer
    from trainers.marlhf import order_agreement
    from trainers.ppo import PPOTrainer

    trainer = PPOTrainer if run.section.rl_algorithm == "ppo" else MAGRPOTrainer
    return trainer(
        online_section(run.config),  # type: ignore[arg-type]
        run.team,
        rollout,
        run.loop,
        run.sampling,
        lambda trees: tree_metrics(trees) | order_agreement(trees),
    )


def reward_base(run: Run) -> Any:
    """What the reward model starts from: ``reward_model_name``, or main's own base."""
    from comlrl.reward_model import RewardBase

    config, main_agent = run.config, run.team.agents[-1]
    own = config.agents[-1] if config.agents is not None else config.agent_model.name
    name = run.section.reward_model_name or own
    same = name == own
    lora = config.lora
    return RewardBase(
        name,
        main_agent.model.dtype,
        str(main_agent.device),
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


if __name__ == "__main__":
    sys.exit(main("marlhf", build))
