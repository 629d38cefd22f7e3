"""Settings that have no effect where they stand are reported, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.runs import resolved

ROOT = Path(__file__).parents[4]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def unused_keys(file: Path, *overrides: str) -> list[str]:
    """Each setting that is reported to have no effect."""
    *_, notices = resolved(file, *overrides)
    lines = [n for n in notices if " no effect: " in n]
    return [part.split("=")[0] for line in lines for part in line.split(" ha")[0].split(", ")]


def quickstart(algorithm: str) -> Path:
    return ROOT / "configs" / f"{algorithm}_quickstart.yaml"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_say_nothing_in_vain(path):
    """But the shift that was published for preferences, where it changes nothing."""
    published = path.stem.split("_")[0] in ("madpo", "marlhf") and "quickstart" not in path.stem
    assert unused_keys(path) == (["reward_processor.shift"] if published else [])


VLLM = "generation.backend=vllm generation.vllm_url=http://localhost:8000"
IN_VAIN = [  # file, what is given, what of it has no effect
    ("magrpo", "magrpo.discount=0.5", "magrpo.discount"),
    ("magrpo", "magrpo.early_termination_threshold=3", "magrpo.early_termination_threshold"),
    ("magrpo", "magrpo.handoff=random", "magrpo.handoff"),
    ("magrpo", "external.mode=plain", "external.mode"),
    (
        "mt_magrpo",
        "external.history=full external.original_prompt=true",
        "external.original_prompt",
    ),
    (
        "mt_magrpo",
        "external.history=full external.previous_response=false",
        "external.previous_response",
    ),
    ("mt_magrpo", "external.expert_model=gpt-5", "external.expert_model"),
    ("mt_magrpo", "external.on_error=plain", "external.on_error"),
    ("mt_magrpo", "external.mode=plain external.sandbox_slice=3", "external.sandbox_slice"),
    (
        "magrpo",
        "reward.target=tests.support.fakes:FakeReward reward.arguments.value=1 sandbox.timeout=3",
        "sandbox.timeout",
    ),
    ("grpo", "grpo.joint_mode=cross", "grpo.joint_mode"),
    ("grpo", "grpo.turn_order=sequential", "grpo.turn_order"),
    ("magrpo", "magrpo.num_generations_sequential=3", "magrpo.num_generations_sequential"),
    (
        "madpo",
        "madpo.turn_order=sequential madpo.num_generations_sequential=3",
        "madpo.num_generations_sequential",
    ),
    (
        "shppo",
        "shppo.turn_order=sequential shppo.num_generations_sequential=3",
        "shppo.num_generations_sequential",
    ),
    ("magrpo", "magrpo.num_turns=2 magrpo.handoff_width=2", "magrpo.handoff_width"),
    ("mt_magrpo", "magrpo.discount=0.5", "magrpo.discount"),
    ("magrpo", "magrpo.eval_interval=0 magrpo.eval_answers=3", "magrpo.eval_answers"),
    ("magrpo", "lora.enabled=false lora.alpha=3", "lora.alpha"),
    ("magrpo", "reward.by_agent=mean", "reward.by_agent"),
    ("magrpo", "program.max_calls=3", "program.max_calls"),
    ("magrpo", "reward_processor.enabled=false reward_processor.shift=3", "reward_processor.shift"),
    ("magrpo", "reward_processor.shift=-4", "reward_processor.shift"),
    ("madpo", "reward_processor.scale_factor=2", "reward_processor.scale_factor"),
    ("madpo", "madpo.num_generations=7", "madpo.num_generations"),
    (
        "madpo",
        "madpo.num_iterations=1 madpo.preferences=a.jsonl madpo.preference_num_candidates=3",
        "madpo.preference_num_candidates",
    ),
    (
        "marlhf",
        "marlhf.num_iterations=1 marlhf.reward_model=a marlhf.reward_learning_rate=1",
        "marlhf.reward_learning_rate",
    ),
    ("marlhf", "marlhf.num_iterations=1 marlhf.refit_below=0.6", "marlhf.refit_below"),
    ("madpo", "madpo.replay=all madpo.replay_rounds=3", "madpo.replay_rounds"),
    (
        "madpo",
        "madpo.replay=last_k madpo.replay_rounds=3 madpo.replay_lambda=0.3",
        "madpo.replay_lambda",
    ),
    ("marlhf", "marlhf.rl_algorithm=ppo magrpo.advantage=max", "magrpo.advantage"),
    ("marlhf", "ppo.clip_range=0.3", "ppo.clip_range"),
    ("magrpo", "magrpo.update_epochs=1 magrpo.clip_range=0.3", "magrpo.clip_range"),
    ("ppo", "ppo.kl_horizon=3", "ppo.kl_horizon"),
    ("ppo", "ppo.ppo_epochs=1 ppo.target_kl=0.1", "ppo.target_kl"),
    ("ppo", "ppo.ppo_epochs=1 ppo.train_batch_size=null ppo.clip_range=0.3", "ppo.clip_range"),
    ("ppo", "ppo.granularity=turn ppo.gamma_token=0.9", "ppo.gamma_token"),
    ("ppo", "ppo.granularity=turn ppo.gae_lambda=0.5", "ppo.gae_lambda"),
    ("ppo", "ppo.shared_policy=true", "ppo.shared_policy"),
    ("ppo", "ppo.kl_in=loss", "ppo.kl_in"),
    ("shppo", "shppo.gae_lambda=0.5", "shppo.gae_lambda"),
    ("shppo", "shppo.num_agents=1 shppo.lambda_d=0.5", "shppo.lambda_d"),
    ("shppo", "shppo.latents=zero shppo.lambda_e=0.5", "shppo.lambda_e"),
    ("shppo", "shppo.latents=sampled shppo.latent_gradient=policy", "shppo.latent_gradient"),
    (
        "shppo",
        "shppo.latent_gradient=policy shppo.inference_learning_rate=1",
        "shppo.inference_learning_rate",
    ),
    ("magrpo", "magrpo.temperature=0.5 agent_model.temperature=0.7", "agent_model.temperature"),
    ("magrpo", "magrpo.top_p=0.5 agent_model.top_p=0.7", "agent_model.top_p"),
    ("magrpo", "magrpo.top_k=5 agent_model.top_k=7", "agent_model.top_k"),
    ("magrpo", "magrpo.top_p=1 generation.max_support=9", "generation.max_support"),
    ("madpo", "madpo.top_p=0.9 generation.max_support=9", "generation.max_support"),
    *(
        (
            "magrpo",
            f"sampling.aux.{key}=1 sampling.main.{key}=1 magrpo.{key}={value}",
            f"magrpo.{key}",
        )
        for key, value in {"max_new_tokens": 5, "temperature": 2, "top_p": 0.5, "top_k": 3}.items()
    ),
    ("magrpo", "agents=[a,b] agent_model.name=c", "agent_model.name"),
    ("magrpo", "domain=writing sandbox.timeout=3", "sandbox.timeout"),
    ("magrpo", "generation.vllm_url=http://localhost:8000", "generation.vllm_url"),
    ("magrpo", "generation.importance_cap=3", "generation.importance_cap"),
    ("shppo", "generation.decoding=static", "generation.decoding"),
    ("magrpo", f"{VLLM} generation.max_support=9", "generation.max_support"),
    ("madpo", f"{VLLM} madpo.top_p=null generation.importance_cap=3", "generation.importance_cap"),
    (
        "magrpo",
        f"{VLLM} magrpo.top_p=null generation.max_batch_tokens=99",
        "generation.max_batch_tokens",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "key"), IN_VAIN)
def test_settings_without_effect_are_reported(name, overrides, key):
    assert key in unused_keys(quickstart(name), *overrides.split())


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mt_magrpo", "magrpo.handoff_width=2 magrpo.discount=0.5 external.mode=plain"),
        ("mt_magrpo", "magrpo.turn_order=sequential magrpo.discount=0.5"),
        ("mt_magrpo", "magrpo.advantage=raw magrpo.discount=0.5"),
        ("magrpo", "magrpo.turn_order=sequential magrpo.num_generations_sequential=3"),
        ("marlhf", "agent_model.top_k=9 generation.max_support=9"),
        ("mt_magrpo", "external.history=last external.original_prompt=true"),
        ("mt_magrpo", "external.mode=expert_edits external.expert_model=gpt-5"),
        ("magrpo", "magrpo.discount=0.9"),  # the default, given
        ("magrpo", "sampling.aux.temperature=0.5 magrpo.temperature=0.7"),
        ("magrpo", "sampling.main.top_k=9 magrpo.top_p=1 generation.max_support=9"),
        ("madpo", "madpo.replay=lambda_decay madpo.replay_rounds=3 madpo.replay_lambda=0.3"),
        ("magrpo", "magrpo.joint_mode=cross lora.alpha=3"),
        ("marlhf", "magrpo.update_epochs=2 magrpo.clip_range=0.3"),
        ("mt_magrpo", "magrpo.early_termination_threshold=0 reward_processor.shift=-4"),
        ("magrpo", "reward_processor.scale_factor=2"),
        ("ppo", "ppo.gae_lambda=0.5 ppo.gamma_token=0.9 reward_processor.shift=-4"),
        ("ppo", "ppo.kl_coef=0.1 ppo.kl_target=0.1 ppo.kl_horizon=3 ppo.ppo_epochs=2"),
        ("marlhf", "marlhf.rl_algorithm=ppo ppo.clip_range=0.3"),
        (
            "magrpo",
            f"{VLLM} magrpo.top_p=null generation.importance_cap=3 generation.vllm_patience=9",
        ),
        ("marlhf", "magrpo.num_generations=7 marlhf.preference_num_candidates=3"),
    ],
)
def test_what_has_an_effect_is_not(name, overrides):
    given = {item.partition("=")[0] for item in overrides.split()}
    assert not given & set(unused_keys(quickstart(name), *overrides.split()))


def test_a_line_names_value_and_reason_and_a_repeated_run_says_the_same(tmp_path):
    file = quickstart("magrpo")
    config, _, notices = resolved(file, "magrpo.discount=0.5", "magrpo.handoff=best")
    assert any("magrpo.discount=0.5" in n and "magrpo.handoff=best" in n for n in notices)
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(config.to_dict()))
    again, _, notices_again = resolved(written)
    assert again == config and notices_again == notices
