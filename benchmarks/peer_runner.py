"""Runs in the peer's own environment (``.venv-peer``): one training run of comlrl 1.4.3.

Reads a JSON description on standard input, prints one JSON line with rewards and their times, when
each generation and update began and ended, and the tokens of each completion, its end included. It
must not import this project: both packages are called ``comlrl``. Rewards come from a function of
``plain_reward``, in-process as in the peer's own scripts, or from the process ``reward_command``.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path.cwd()]
sys.path.insert(0, str(Path(__file__).resolve().parent))


class Enough(Exception):
    """The run's time is over."""


def main() -> None:
    job = json.load(sys.stdin)
    import plain_reward
    import torch

    torch.manual_seed(job["seed"])
    torch.set_num_threads(job["threads"])
    reward = getattr(plain_reward, job.get("reward", "reward"))
    worker = (
        process_reward(job["reward_command"], job["folder"]) if "reward_command" in job else None
    )
    clock = getattr(time, job.get("clock", "monotonic"))  # of ``seconds``
    rewards: list[float] = []
    ended: list[float] = []

    def reward_func(*completions: list[str], batch_items: list[dict]) -> list[float]:
        item = batch_items[0]
        texts_G = list(zip(*completions, strict=True))
        scores = worker(item, texts_G) if worker else [reward(texts, item) for texts in texts_G]
        rewards.extend(scores)
        ended.append(time.monotonic())
        if clock() - began > job.get("seconds", float("inf")):
            raise Enough
        return scores

    trainer = made(job, reward_func)
    lengths, spans = observe(trainer)
    started, began = time.monotonic(), clock()
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Enough):
        trainer.train()
    seconds = time.monotonic() - started
    if "save" in job:
        for index, agent in enumerate(trainer.agents):
            agent.save_pretrained(Path(job["save"]) / str(index))
            trainer.tokenizers[index].save_pretrained(Path(job["save"]) / str(index))
    results = {
        "seconds": seconds,
        "rewards": rewards,
        "times": [t - started for t in ended],
        "spans": spans,
        "lengths": lengths,
        "peak_memory_mb": peak_memory_mb(),
    }
    print(json.dumps(results))


def made(job: dict, reward_func: Callable[..., list[float]]) -> Any:
    """Return CoMLRL 1.4.3's trainer of two agents or one."""
    import torch
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
    from datasets import Dataset
    from transformers import AutoTokenizer

    agents = len(job["tasks"][0]["prompts"])
    formatters = [lambda item, i=i: item["prompts"][i] for i in range(agents)]
    settings = MAGRPOConfig(
        num_agents=agents,
        num_train_epochs=job.get("epochs", 1),
        agent_learning_rate=job["learning_rate"],
        num_generations=job["num_generations"],
        max_new_tokens=job["max_new_tokens"],
        temperature=job.get("temperature", 1.0),
        top_p=job.get("top_p", 1.0),
        top_k=0,
        num_turns=1,
        joint_mode=job.get("joint_mode", "aligned"),
        eval_interval=0,
        rollout_buffer_size=job["batch_size"],
        advantage_normalization=False,
        early_termination_threshold=None,
    )
    dtype = getattr(torch, job["dtype"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = job.get("pad_token", tokenizer.pad_token)
    trainer = MAGRPOTrainer(
        agent_model=job["model"],
        num_agents=agents,
        tokenizer=tokenizer,
        model_config={"torch_dtype": dtype},
        train_dataset=Dataset.from_list(job["tasks"]),
        reward_func=reward_func,
        formatters=formatters,
        args=settings,
    )
    assert all(agent.dtype == dtype for agent in trainer.agents)  # and not what the file has
    return trainer


def process_reward(command: list[str], folder: str) -> Any:
    """Return a reward computed by a process in ``folder``.

    It receives a JSON line for a task's completions and answers with a line of rewards.
    """
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder)

    def scores(item: dict, texts_G: list) -> list[float]:
        assert worker.stdin is not None and worker.stdout is not None
        line = json.dumps({"task": item["index"], "completions": texts_G})
        print(line, file=worker.stdin, flush=True)
        return json.loads(worker.stdout.readline())

    return scores


def observe(trainer: Any) -> tuple[list[int], list[tuple[str, float, float]]]:
    """Return lists that training fills.

    They are the tokens of each completion, and (phase, start, end): "generation" of one task's
    completions or "update" of one agent.
    """
    generate, update = trainer._generate_completions, trainer._update_from_samples
    end = trainer.tokenizers[0].eos_token_id
    lengths: list[int] = []
    spans: list[tuple[str, float, float]] = []

    def counted(*arguments: Any, **keywords: Any) -> dict:
        began = time.monotonic()
        data = generate(*arguments, **keywords)
        spans.append(("generation", began, time.monotonic()))
        for tokens in data["completion_input_ids"][0]:
            ids = tokens.tolist()
            lengths.append(ids.index(end) + 1 if end in ids else len(ids))
        return data

    def timed(*arguments: Any) -> None:
        began = time.monotonic()
        update(*arguments)
        spans.append(("update", began, time.monotonic()))

    trainer._generate_completions, trainer._update_from_samples = counted, timed
    return lengths, spans


def peak_memory_mb() -> float:
    """Return the peak of the GPU's allocator, or without a GPU that of the process."""
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
