"""Suggestions for unknown keys: names of TRL, verl and CoMLRL 1.4, and similar names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

# Last part of a key → its names in TRL, verl, CleanRL and CoMLRL 1.4.
SYNONYMS = {
    "learning_rate": "lr actor_lr learning_rate_actor agent_learning_rate policy_lr",
    "value_learning_rate": "critic_lr value_lr critic_learning_rate learning_rate_critic vf_lr",
    "reward_learning_rate": "reward_lr reward_model_lr",
    "discount": "gamma discount_factor",
    "gae_lambda": "lam lmbda gae_lam lambda td_lambda",
    "dpo_beta": "beta",
    "kl_coef": "beta kl_beta kl_coeff init_kl_coef kl_loss_coef reference_kl_coef",
    "kl_target": "target kl_target_value",
    "entropy_coef": "entropy_coeff ent_coef entropy_beta entropy_weight entropy_loss_coef",
    "clip_range": "epsilon clip_eps clip_ratio cliprange clip_epsilon clip_coef eps_clip",
    "value_clip_range": "cliprange_value vf_clip value_clip vf_clip_param",
    "ppo_epochs": "num_ppo_epochs noptepochs update_epochs inner_epochs num_iterations",
    "update_epochs": "num_iterations mu inner_epochs ppo_epochs",
    "num_train_epochs": "epochs num_epochs total_epochs n_epochs max_epochs",
    "max_steps": "total_training_steps max_train_steps total_steps train_steps num_training_steps",
    "max_env_steps": "total_timesteps total_episodes num_steps max_timesteps",
    "batch_size": "per_device_train_batch_size per_device_batch_size rollout_batch_size",
    "train_batch_size": "mini_batch_size minibatch_size ppo_mini_batch_size num_minibatches "
    "micro_batch_size gradient_accumulation_steps rollout_buffer_size",
    "num_generations": "n group_size num_samples num_return_sequences rollout_n samples_per_prompt",
    "max_new_tokens": "max_completion_length max_response_length response_length max_tokens "
    "max_gen_len max_generation_length completion_length",
    "agent_model.max_length": "max_prompt_length max_seq_length max_seq_len max_model_len "
    "context_length prompt_length",
    "max_grad_norm": "grad_clip clip_grad grad_norm gradient_clipping clip_grad_norm",
    "lr_scheduler": "lr_scheduler_type scheduler lr_schedule",
    "warmup_steps": "warmup warmup_ratio num_warmup_steps lr_warmup_steps",
    "eval_interval": "eval_steps eval_freq eval_every evaluation_steps",
    "eval_num_samples": "eval_size num_eval_samples max_eval_samples eval_samples",
    "save_steps": "save_freq save_interval save_every checkpoint_interval",
    "logging_steps": "log_freq log_interval logging_interval log_every",
    "num_agents": "n_agents agents_num",
    "num_turns": "max_turns n_turns turns max_assistant_turns",
    "advantage": "adv_estimator advantage_mode advantage_estimator",
    "advantage_normalization": "scale_rewards normalize_advantage norm_adv norm_adv_by_std_in_grpo",
    "normalize_advantages": "whiten_rewards normalize_advantage norm_adv advantage_normalization "
    "scale_rewards",
    "early_termination_threshold": "termination_threshold",
    "replay": "preference_replay_mode",
    "critic_model": "use_separate_critic value_model",
    "reward_model": "reward_model_path",
    "agent_model.name": "model_name_or_path model_path pretrained base_model "
    "pretrained_model_name_or_path model_id",
    "agent_model.torch_dtype": "dtype bf16 fp16 precision",
    "agent_model.attn_implementation": "attn_impl use_flash_attention flash_attn",
    "agent_model.gradient_checkpointing": "enable_gradient_checkpointing",
    "agent_model.stop": "stop_strings stop_sequences stop_words",
    "lora.enabled": "use_peft use_lora peft",
    "lora.r": "lora_r lora_rank rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules",
    "dataset.name": "dataset_name train_files dataset_path data_path train_file",
    "dataset.train_split": "split dataset_train_split",
    "dataset.eval_split": "val_split",
    "output.dir": "output_dir default_local_dir save_dir",
    "wandb.project": "project_name wandb_project report_to",
    "wandb.name": "run_name experiment_name wandb_name",
    "generation.backend": "use_vllm rollout_backend",
    "generation.vllm_url": "vllm_server_base_url vllm_server_host vllm_host",
    "distributed.strategy": "fsdp deepspeed",
    "reward.target": "reward_funcs reward_function reward_fn custom_reward_function",
    "reward_processor.scale_factor": "reward_scale reward_scaling",
    "reward_processor.shift": "reward_shift",
    "agent_devices": "devices",
}
# Other libraries' dotted keys whose last part means something else here → this framework's name.
WHOLE = {
    "data.train_batch_size": "batch_size",
    "actor_rollout_ref.model.path": "agent_model.name",
}
# Removed keys and sections without a counterpart → what to do instead.
REMOVED = {
    "parallel_training": "leave it out; several processes are started by torchrun",
    "reference_kl_enabled": "leave it out; kl_coef above 0 enables it",
    "reference_devices": "leave it out; the reference is the base without its adapter",
    "eval_batch_size": "leave it out; an evaluation is one batch",
    "collaboration_mode": "leave it out; one agent is grpo",
    "environment_steps_per_pair": "leave it out; it is always 2",
    "external_prompt_passthrough": "leave it out; modes return what follows the history",
    "reward_model_device": "leave it out",
    "save_path": "leave it out; trained weights are in final_model/ of output.dir",
    "critics": "use ppo.critic_model, one model for all critics",
    "critic_devices": "leave it out",
    "critic_type": "leave it out; critics are of states",
    "critic_value_head_hidden_dim": "leave it out",
    "value_head_hidden_dim": "leave it out",
    "value_loss_coef": "leave it out; critics have their own optimizers",
    "iac": "use ppo",
    "maac": "use ppo",
    "mlflow": "log with trackio, wandb or TensorBoard",
    "comparator": "leave it out; the task reward compares",
    "train_agents": "set agents.ROLE.train=false for the other agents",
}
WITHOUT_EFFECT = {
    "mlflow": None,
    "comparator": "reward",
    "train_agents": None,
}  # removed key → its value in files of older runs, which is ignored
PAGE = "docs/migration.md"  # lists the changed keys


def hint(key: str, keys: Sequence[str], algorithm: str) -> str:
    """Return a suggestion for an unknown key; "" if no key is similar.

    The last part of the key is looked up in all sections: first among removed keys, then among
    valid keys, then among other libraries' names. If several keys match, those of the same section
    come first, then those of the algorithm's section, then the most similar.

    Args:
        keys: all valid dotted keys.
    """
    key = WHOLE.get(key.lower(), key)
    section, *parts = key.lower().split(".")
    within = [parts[0]] if parts and any(k.startswith(f"{section}.") for k in keys) else []
    names = [*within, parts[-1] if parts else section]
    for name in (*names, section):
        if name in REMOVED:
            return f"{REMOVED[name]} ({PAGE})"
    matches = next(filter(None, (_named(name, keys, algorithm) for name in names)), [])
    if not matches:
        alike = {k: SequenceMatcher(None, names[0], _last(k)).ratio() for k in keys}
        best = max(alike.values())
        matches = [k for k, ratio in alike.items() if ratio == best > 0.6]

    def nearness(other: str) -> tuple[bool, bool, float]:
        head = other.partition(".")[0]
        return head == section, head == algorithm, SequenceMatcher(None, key, other).ratio()

    return f"did you mean `{max(matches, key=nearness)}`?" if matches else ""


def _named(name: str, keys: Sequence[str], algorithm: str) -> list[str]:
    """Return the keys with this last part, or else those with this name in another library."""
    meant = {ours for ours, names in SYNONYMS.items() if name in names.split()}
    return [k for k in keys if _last(k) == name] or [
        k for k in keys if k in meant or (k.partition(".")[0] == algorithm and _last(k) in meant)
    ]


def _last(key: str) -> str:
    return key.rpartition(".")[2]
