"""TRL's GRPO trainer on main's prompts: reads a job on standard input, prints one JSON line."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from datasets import Dataset
    from peer_runner import peak_memory_mb
    from plain_reward import reward
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            step_times.append(time.monotonic())

    torch.set_num_threads(job["threads"])
    step_times: list[float] = []
    lengths: list[int] = []

    def reward_func(
        completions: list[str], test: list[str], entry_point: list[str], **k: Any
    ) -> list:
        lengths.extend(map(len, k["completion_ids"]))
        return [
            reward([text], {"test": t, "entry_point": e})
            for text, t, e in zip(completions, test, entry_point, strict=True)
        ]

    rows = [
        {"prompt": task["prompts"][-1], "test": task["test"], "entry_point": task["entry_point"]}
        for task in job["tasks"]
    ]
    generations, batch = job["num_generations"], job["batch_size"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        settings = GRPOConfig(
            output_dir=folder,
            learning_rate=job["learning_rate"],
            per_device_train_batch_size=batch * generations,
            num_generations=generations,
            max_completion_length=job["max_new_tokens"],
            num_train_epochs=1,
            temperature=1.0,
            beta=0.0,
            scale_rewards="none",
            bf16=job["bf16"],
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            use_cpu=not torch.cuda.is_available(),
            model_init_kwargs={"dtype": job["dtype"]},
        )
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=reward_func,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        )
        trainer.add_callback(Clock())
        trainer.train()
    memory = peak_memory_mb()
    results = {"step_times": step_times, "lengths": lengths, "peak_memory_mb": memory}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
