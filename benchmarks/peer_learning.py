"""What comlrl 1.4.3 learns on a real model in a given time: SmolLM2 on CoopHumanEval.

    make real-model
    python benchmarks/peer_learning.py --seconds 900 --learning-rate 1e-5 [KEY=VALUE …]

The problems, prompts, prefill, reward, number of completions and length are those of
``configs/smollm2_magrpo_che.yaml``; KEY=VALUE changes it. The peer pairs completions (align), has
no stop strings, and trains all weights in bfloat16, its faster precision. The training reward of
each tenth of the run is printed. The agents are saved under ``--out``, for ``evaluate.py``:

    python evaluate.py --config configs/smollm2_magrpo_che.yaml \
        --override 'agents=[OUT/0, OUT/1]' …
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_train_step import PEER, make_peer, runner
from reward_worker import resolve

from trainers.launch.checks.at_hand import agents_at_hand
from trainers.launch.wiring.task_splits import load_both_splits

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "smollm2_magrpo_che.yaml"
UNUSED = "<|endoftext|>"  # <|im_end|> stands in every prompt, and the peer pads with what it finds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="of its CPU time")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "peer")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    config, work = resolve(str(CONFIG), options.overrides)
    section, agents = config.section, agents_at_hand(config, [])
    make_peer()
    tasks = [
        {
            "index": index,
            "prompts": [
                agent.encoder.tokenizer.decode(agent.encoder.encode(prompt))
                for agent, prompt in zip(agents, work.prompts.first_N(task, 2), strict=True)
            ],
        }
        for index, task in enumerate(load_both_splits(config, work.domain)[0])
    ]
    worker = str(Path(__file__).with_name("reward_worker.py"))
    job = {
        "seed": config.seed,
        "threads": options.threads,
        "learning_rate": options.learning_rate,
        "num_generations": section.num_generations,
        "max_new_tokens": section.max_new_tokens,
        "batch_size": section.batch_size,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "dtype": "bfloat16",
        "model": str(Path(config.agent_model.name).resolve()),
        "pad_token": UNUSED,
        "tasks": tasks,
        "epochs": 1000,
        "seconds": options.seconds,
        "clock": "process_time",
        "reward_command": [sys.executable, worker, str(CONFIG), *options.overrides],
        "folder": str(Path.cwd()),
        "save": str(options.out.resolve()),
    }
    results = runner(PEER / "bin" / "python", "peer_runner.py", job)
    rewards = results["rewards"]
    tenths = [rewards[len(rewards) * i // 10 : len(rewards) * (i + 1) // 10] for i in range(10)]
    lengths = results["lengths"]
    print(json.dumps({
        "seconds": round(results["seconds"]),
        "joint_actions": len(rewards),
        "tokens": sum(lengths),
        "mean_length": round(statistics.fmean(lengths), 1),
        "reward_of_each_tenth": [round(statistics.fmean(part), 2) for part in tenths],
        "peak_memory_mb": round(results["peak_memory_mb"]),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
