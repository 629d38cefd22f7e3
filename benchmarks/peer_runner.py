"""Runs in the peer's own environment (``.venv-peer``): one training run of comlrl 1.4.3.

Reads a JSON description on standard input, prints one JSON line with rewards and their times, the
ends of all updates, and the tokens of each completion, its end included. It must not import this
project: both packages are called ``comlrl``. Rewards come from ``plain_reward``, in-process as in
the peer's own scripts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path.cwd()]
sys.path.insert(0, str(Path(__file__).resolve().parent))


class Enough(Exception):
    """The time that was given is over."""


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
    from datasets import Dataset
    from plain_reward import reward
    from transformers import AutoTokenizer

    torch.manual_seed(job["seed"])
    torch.set_num_threads(job["threads"])
    rewards: list[float] = []
    ended: list[float] = []

    def reward_func(*completions: list[str], batch_items: list[dict]) -> list[float]:
        item = batch_items[0]
        scores = [reward(texts, item) for texts in zip(*completions, strict=True)]
        rewards.extend(scores)
        ended.append(time.monotonic())
        if ended[-1] - started > job.get("seconds", float("inf")):
            raise Enough
        return scores

    agents = len(job["tasks"][0]["prompts"])
    formatters = [lambda item, i=i: item["prompts"][i] for i in range(agents)]
    settings = MAGRPOConfig(
        num_agents=agents,
        num_train_epochs=job.get("epochs", 1),
        agent_learning_rate=job["learning_rate"],
        num_generations=job["num_generations"],
        max_new_tokens=job["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_turns=1,
        eval_interval=0,
        rollout_buffer_size=job["batch_size"],
        advantage_normalization=False,
        early_termination_threshold=None,
    )
    kwargs = {"torch_dtype": getattr(torch, job["dtype"])}
    trainer = MAGRPOTrainer(
        agent_model=job["model"],
        num_agents=agents,
        tokenizer=AutoTokenizer.from_pretrained(job["model"]),
        model_config={"model_kwargs": kwargs},
        train_dataset=Dataset.from_list(job["tasks"]),
        reward_func=reward_func,
        formatters=formatters,
        args=settings,
    )
    lengths, updated = observe(trainer)
    started = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Enough):
        trainer.train()
    seconds = time.monotonic() - started
    memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _rss()
    said = {
        "seconds": seconds,
        "rewards": rewards,
        "times": [t - started for t in ended],
        "update_times": updated,
        "lengths": lengths,
        "peak_memory_mb": memory,
    }
    print(json.dumps(said))


def observe(trainer: Any) -> tuple[list[int], list[float]]:
    """Lists that training fills: tokens of each completion, and when each agent's updates ended."""
    generate, update = trainer._generate_completions, trainer._update_from_samples
    end = trainer.tokenizers[0].eos_token_id
    lengths: list[int] = []
    updated: list[float] = []

    def counted(*given: Any, **named: Any) -> dict:
        data = generate(*given, **named)
        for tokens in data["completion_input_ids"][0]:
            ids = tokens.tolist()
            lengths.append(ids.index(end) + 1 if end in ids else len(ids))
        return data

    def timed(*given: Any) -> None:
        update(*given)
        updated.append(time.monotonic())

    trainer._generate_completions, trainer._update_from_samples = counted, timed
    return lengths, updated


def _rss() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
