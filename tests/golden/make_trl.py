"""Golden numbers of TRL 1.16.0 (Hugging Face, Apache-2.0), which has no ReMax and no GAE any more:
run it in its own environment, from this folder.

    python3 -m venv env
    env/bin/pip install trl==1.16.0 torch
    env/bin/python make_trl.py > trl.json
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from typing import Any

import tokenizers
import torch
import toy
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

COUNT = len(toy.REWARDS[0])


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(256)} | {"<eos>": 256, "<pad>": 257}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def advantages(kind: str, **settings: Any) -> list[list[float]]:
    """What the trainer gives each completion in its first step; rewards are given."""
    rewards = [r for group in toy.REWARDS for r in group]
    made, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = made(
            model=toy.model(5).float(),
            processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: rewards[: len(completions)],
            train_dataset=Dataset.from_list([{"prompt": f"w{i}"} for i in range(3)]),
            args=config(
                output_dir=folder, per_device_train_batch_size=len(rewards), max_steps=1,
                num_generations=COUNT, max_completion_length=4, beta=0.0, report_to="none",
                use_cpu=True, bf16=False, shuffle_dataset=False, **settings,
            ),
        )  # fmt: skip
        found: list[torch.Tensor] = []
        score = trainer._generate_and_score_completions

        def scored(inputs: Any) -> Any:
            outputs = score(inputs)
            found.append(outputs["advantages"].double())
            return outputs

        trainer._generate_and_score_completions = scored
        trainer.train()
    return found[0].view(-1, COUNT).tolist()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(
        json.dumps(
            {
                "versions": {"trl": trl.__version__},
                "grpo": advantages("GRPO", scale_rewards="group"),
                "grpo, not normalized": advantages("GRPO", scale_rewards="none"),
                "rloo": advantages("RLOO"),
            },
            indent=1,
        )
    )
