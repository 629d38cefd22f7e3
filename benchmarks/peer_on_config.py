"""comlrl 1.4.3 on a configuration of MAGRPO: our prompts, reward and evaluation, its training.

    python benchmarks/peer_on_config.py configs/smollm2_magrpo_functions.yaml --minutes 17 \\
        --rates 5e-6 2e-5 5e-5 --override agent_model.name=models/smollm2-135m-instruct

Each rate begins with the configuration's model and seed. The peer (in ``.venv-peer``, which is made
here if missing) trains all weights of two models in float32; tasks a step, answers to a task,
tokens and temperature are the configuration's. Its answers are cut at the first stop string before
they are scored. Run it with ``taskset`` to compare on as many cores as a run of ours had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_train_step import PEER, ROOT, make_peer, runner
from reward_worker import resolve

from comlrl.loggers.tables import table
from comlrl.processes.cores import available_cores
from comlrl.trainers.launch.checks.at_hand import agents_at_hand
from comlrl.trainers.launch.wiring.task_splits import load_both_splits

WINDOW = 128  # joint actions in the first and in the last mean reward


def job_of(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the description that ``peer_runner.py`` reads, without rate, time and folder."""
    config, work = resolve(file, overrides)
    section, encoders = config.section, [a.encoder for a in agents_at_hand(config, [])]
    tasks = load_both_splits(config.dataset, section, work.domain)[0]
    texts = [
        [e.tokenizer.decode(e.encode(p)) for e, p in zip(encoders, prompts, strict=True)]
        for prompts in (work.prompts.first_N(task, section.num_agents) for task in tasks)
    ]
    # The peer takes a prompt's tokens that pad for its end.
    written = {text for texts_N in texts for text in texts_N}
    special = encoders[0].tokenizer.all_special_tokens
    pad = next(token for token in special if not any(token in text for text in written))
    return {
        "pad_token": pad,
        "seed": config.seed,
        "threads": available_cores(),
        "epochs": 1000,
        "num_generations": section.num_generations,
        "joint_mode": {"align": "aligned"}.get(section.joint_mode, section.joint_mode),
        "max_new_tokens": section.max_new_tokens,
        "temperature": section.temperature,
        "top_p": section.top_p or 1.0,
        "batch_size": section.batch_size,
        "dtype": "float32",
        "model": str(Path(config.agent_model.name).resolve()),
        "tasks": [{"index": i, "prompts": prompts} for i, prompts in enumerate(texts)],
        "reward_command": [sys.executable, "benchmarks/reward_worker.py", file, *overrides],
        "folder": str(ROOT),
    }


def evaluation(file: str, overrides: Sequence[str], agents: Path) -> dict[str, float]:
    """Return our evaluation's metrics of the two models in a folder."""
    out = agents / "evaluation.json"
    command = [sys.executable, "evaluate.py", "--config", file, "--out", str(out), "--override"]
    command += [*overrides, f"agents=[{agents / '0'},{agents / '1'}]", "lora.enabled=false"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return json.loads(out.read_text())["metrics"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, required=True, help="CPU time of each training")
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "peer")
    options = parser.parse_args()
    make_peer()
    job = job_of(options.config, options.override) | {
        "clock": "process_time",
        "seconds": 60 * options.minutes,
    }
    head = ["rate", "joint actions", "updates", "first mean reward", "last", "pass@1", "teamwork"]
    rows = []
    for rate in options.rates:
        folder = (options.out / f"{rate:g}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = runner(
            PEER / "bin" / "python",
            "peer_runner.py",
            job | {"learning_rate": rate, "save": str(folder)},
        )
        metrics, rewards = evaluation(options.config, options.override, folder), results["rewards"]
        updates = sum(what == "update" for what, _, _ in results["spans"]) // 2
        ends = [statistics.fmean(part) for part in (rewards[:WINDOW], rewards[-WINDOW:])]
        rates = [metrics["pass@1"], metrics["teamwork_rate"]]
        rows.append(
            [f"{rate:g}", str(len(rewards)), str(updates), *(f"{x:.2f}" for x in ends + rates)]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(head, rows))


if __name__ == "__main__":
    main()
