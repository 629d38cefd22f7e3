"""Record the numbers of short runs, to show that a change of code leaves them as they were.

    python tools/freeze.py numbers.json                   # every quickstart: minutes
    python tools/freeze.py numbers.json --against before.json
    python tools/freeze.py small.json --quick --only 'ppo|magrpo_program'

Each run trains three steps, evaluates before and after, and saves a checkpoint. Its logged metrics
(less those of clock and memory), its samples and the hashes of all that its checkpoint holds are
recorded. The quickstarts run with LoRA and with all weights, in one and in two processes, with one
thread. ``--quick`` runs them with smaller batches, LoRA and one process alone, together with the
settings that no quickstart has (``VARIANTS``). Floating-point sums differ between machines, so
compare numbers of one machine. The exit code is 1 if numbers differ, a run fails, or a run of the
other file is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

ROOT = Path.cwd()  # of the checkout whose numbers are taken
CLOCK = re.compile(r"second|^time/|memory")
PROGRAM = (
    "program.target=comlrl.rewards.code.write_test_fix:play program.agents=[helper,main] "
    "program.max_calls=3"
)
CENTRALIZED = "critic=centralized granularity=turn"
VARIANTS = {  # quickstart → further settings of it; keys without a dot are the algorithm's
    "magrpo": (
        "update_epochs=2 train_batch_size=2 entropy_coef=0.01 advantage=rloo",
        "joint_mode=cross num_generations=3 advantage=max advantage_normalization=true",
        "generation.decoding=static",
    ),
    "mt_magrpo": (
        "advantage=greedy handoff=null num_generations=2",
        "handoff=random handoff_width=2 num_generations=4",
    ),
    "magrpo_sequential": ("advantage=greedy num_turns=2 num_generations=2",),
    "magrpo_program": (
        "advantage=greedy update_epochs=2 train_batch_size=2",
        "entropy_coef=0.01 advantage=raw",
    ),
    "arena_dilemma": ("reward.by_agent=own",),
    "ippo": (
        f"{PROGRAM}",
        f"{PROGRAM} {CENTRALIZED} kl_coef=0.1",
        "num_turns=2 turn_order=sequential shared_policy=true kl_in=loss entropy_coef=0.01",
        f"{CENTRALIZED} critic_model=builtin:tiny-coder num_turns=2 kl_coef=0.1",
        "critic_model=builtin:tiny-coder target_kl=0.001",
    ),
    "mappo": ("turn_order=sequential num_turns=2 kl_coef=0.1 kl_target=0.1",),
    "arena_chores": ("reward.by_agent=own critic=centralized granularity=turn kl_coef=0.1",),
    "shppo": (
        "turn_order=sequential num_turns=2 kl_coef=0.1 entropy_coef=0.01",
        "latent_gradient=policy num_turns=2",
    ),
    "madpo": ("dpo_reference=start replay=all agents.aux.train=false preference_holdout=0.3",),
    "marlhf": ("rl_algorithm=ppo",),
}
SMALL = "batch_size=4 num_generations=4 eval_num_samples=2 eval_answers=1"
ROUNDS = "batch_size=4 preference_num_candidates=4 round_tasks=4 eval_num_samples=2 eval_answers=1"
SMALL_OF = {"madpo": ROUNDS, "marlhf": f"{ROUNDS} reward_train_batch_size=4"}


def runs(quick: bool) -> Iterator[tuple[str, str, str, int]]:
    """Yield name, configuration, settings and number of processes of each run."""
    for path in sorted((ROOT / "configs").glob("*quickstart.yaml")):
        config = path.stem.removesuffix("_quickstart")
        small = SMALL_OF.get(config, SMALL)
        if quick:
            yield f"{config} small", config, small, 1
            for settings in VARIANTS.get(config, ()):
                yield f"{config} small {settings}", config, f"{small} {settings}", 1
            continue
        for weights in ("true", "false"):
            for count in (1, 2):
                kind = "LoRA" if weights == "true" else "all weights"
                settings = f"eval_num_samples=8 lora.enabled={weights}"
                yield f"{config}, {kind}, processes: {count}", config, settings, count


class Zygote:
    """The test suite's process that has imported everything and forks runs."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "tests/support/zygote.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def numbers(zygote: Zygote, config: str, settings: str, count: int, folder: Path) -> dict[str, Any]:
    """Run once; return what it logged and saved."""
    file = ROOT / f"configs/{config}_quickstart.yaml"
    sections = yaml.safe_load(file.read_text())
    names = ("marlhf", "madpo", "magrpo", "grpo", "shppo", "ppo")
    algorithm = next(name for name in names if name in sections)
    keys = f"max_steps=3 eval_interval=3 save_steps=3 {settings} output.dir={folder}"
    overrides = [key if "." in key.split("=")[0] else f"{algorithm}.{key}" for key in keys.split()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [algorithm, ["--config", str(file), "--override", *overrides]]
    log, pids = folder.with_suffix(".log"), []
    for rank in range(count):
        environment: dict[str, object] = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if count > 1:  # as torchrun sets them
            environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
            environment |= {"LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
            environment |= {"MASTER_ADDR": "127.0.0.1"}
        words = {name: str(value) for name, value in environment.items()}
        pids.append(zygote.ask({"run": run, "log": str(log), "environment": words})["pid"])
    codes = [zygote.ask({"wait": pid})["code"] for pid in pids]
    if any(codes):
        print(log.read_text()[-2000:])
        return {"exit codes": str(codes)}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = {}
    for at, record in enumerate(records):
        metrics = {k: v for k, v in record.pop("metrics").items() if not CLOCK.search(k)}
        for name, value in (record | metrics).items():
            logged[f"record {at}/{name}"] = value if isinstance(value, str) else float(value).hex()
    for part in sorted((folder / "checkpoints").glob("step_*/*.safetensors")):
        for name, tensor in load_file(part).items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            logged[f"{part.stem}/{name}"] = hashlib.sha256(data).hexdigest()[:16]
    logged["samples"] = hashlib.sha256((folder / "samples.jsonl").read_bytes()).hexdigest()[:16]
    return logged


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="name every difference from this file")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="regular expression of runs' names")
    arguments = parser.parse_args()
    chosen = [run for run in runs(arguments.quick) if re.search(arguments.only, run[0])]
    if not chosen:
        parser.error(f"--only {arguments.only}: no run has such a name")
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    taken: dict[str, Any] = {}
    differing, zygote = 0, Zygote()
    with tempfile.TemporaryDirectory() as folder:
        for at, (name, config, settings, count) in enumerate(chosen):
            now = numbers(zygote, config, settings, count, Path(folder) / f"run_{at}")
            taken[name] = now
            old = before.get(name, {} if arguments.against else now)
            changed = [key for key in {**old, **now} if old.get(key) != now.get(key)]
            differing += bool(changed) or "exit codes" in now
            print(f"{name}: {len(now)} numbers, {len(changed)} differ", flush=True)
            for key in changed[:20]:
                print(f"    {key}: {old.get(key)} → {now.get(key)}", flush=True)
    for name in before:
        if re.search(arguments.only, name) and name not in taken:
            differing += 1
            print(f"{name}: missing")
    arguments.output.write_text(json.dumps(taken, indent=1) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
