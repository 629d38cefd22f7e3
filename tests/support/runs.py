"""Real runs in their own processes, for tests of resuming, faults and several processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from comlrl.config.algorithms import SECTIONS, sections_of
from comlrl.config.loader import Loader
from comlrl.config.resolved import Config
from comlrl.loop.checkpoint import tensors_of
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.wiring.weights import run_algorithm

ROOT = Path(__file__).parents[2]
CLOCK = ("time", "second", "memory")  # parts of names of what depends on the clock or the machine
ALGORITHMS = ("grpo", "magrpo", "madpo", "marlhf", "ppo", "shppo")
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = {
    "num_generations": 2, "batch_size": 2, "max_steps": 4, "num_train_epochs": None,
    "max_new_tokens": 6, "eval_interval": 2, "eval_num_samples": 2, "save_steps": 1,
}  # fmt: skip


def algorithm_of(path: Path) -> str:
    """The algorithm whose section a shipped file has, not being one that another reads."""
    return run_algorithm(yaml.safe_load(path.read_text()), SECTIONS, str(path))


def read_config(path: Path | str, algorithm: str) -> tuple[Any, list[str]]:
    """The validated configuration of a file, and its notices."""
    loader = Loader(algorithm, sections_of(algorithm))
    loader.read(path)
    config = loader.build()
    validate(config)
    return config, loader.notices


def load(path: Path) -> Config:
    """The validated configuration of a shipped file."""
    return read_config(path, algorithm_of(path))[0]


def small(algorithm: str, folder: Path, **section: Any) -> list[str]:
    """Arguments for a run of seconds: the quickstart's, smaller. ``section``: further keys."""
    keys = {f"{algorithm}.{name}": value for name, value in (SMALL | section).items()}
    keys |= {"output.dir": str(folder), "lora.r": 4}
    keys |= {"dataset.train_split": "train[:64]", "dataset.eval_split": "eval[:16]"}
    return [
        "--config", str(ROOT / f"configs/{algorithm}_quickstart.yaml"), "--override",
        *(f"{key}={json.dumps(value)}" for key, value in keys.items()),
    ]  # fmt: skip


def small_of(algorithm: str, folder: Path) -> list[str]:
    """Any algorithm's smallest run that does everything it ever does."""
    if algorithm not in ("madpo", "marlhf"):
        return small(algorithm, folder)
    keys = {"preference_num_candidates": 6, "num_iterations": 2, "round_tasks": 4}
    arguments = small(algorithm, folder, max_new_tokens=24, **keys)
    arguments.append("dataset.train_split=train[:8]")
    if algorithm == "marlhf":
        # A round with fewer pairs than a batch would train nothing.
        arguments += ["marlhf.reward_min_accuracy=0", "marlhf.reward_train_batch_size=4"]
    return arguments


class Process:
    """A forked run."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self.zygote, self.pid, self.log = zygote, pid, log
        self._code: int | None = None

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        if self._code is None:
            self._code = self.zygote.ask({"poll": self.pid})["code"]
        return self._code

    def wait(self, seconds: float = 300) -> int:
        self.until(lambda: self.code() is not None, seconds)
        assert self._code is not None
        return self._code

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait for a condition, of which the run's end must not be the first to come."""
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit:
                self.kill()
                raise AssertionError(
                    f"not within {seconds} s; the output of the run:\n{self.output}"
                )
            time.sleep(0.02)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, to everything that the run has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Zygote:
    """``zygote.py``, at one thread for each process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/support/zygote.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self.living: list[Process] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, request: dict[str, Any]) -> Process:
        self.count += 1
        log = self.folder / f"process_{self.count}.log"
        process = Process(self, self.ask(request | {"log": str(log)})["pid"], log)
        self.living.append(process)
        return process

    def run(self, algorithm: str, argv: Sequence[str], **environment: str) -> Process:
        return self.start({"run": [algorithm, list(argv)], "environment": environment})

    def team(self, size: int, request: dict[str, Any]) -> list[Process]:
        """The same request in ``size`` processes that torchrun might have started."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
        } | request.get("environment", {})  # fmt: skip
        return [
            self.start(
                request | {"environment": shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}}
            )
            for rank in range(size)
        ]

    def close(self) -> None:
        for process in self.living:
            if process.code() is None:
                process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def together(zygote: Zygote, file: str, size: int, function: str, *arguments: Any) -> None:
    """Run a function of a file in ``size`` processes that must all succeed."""
    team = zygote.team(size, {"call": [file, function, list(arguments)]})
    codes = [process.wait() for process in team]
    assert not any(codes), "\n".join(process.output for process in team)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """``metrics.jsonl`` without what depends on the clock or the machine."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"] = {
            k: v for k, v in line["metrics"].items() if not any(c in k for c in CLOCK)
        }
    return lines


def newest_step(run_dir: Path) -> int:
    """Number of the newest whole checkpoint; 0 where there is none."""
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    return int(found[-1].name.removeprefix("step_")) if found else 0


def state(owner: Any) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint would hold of a trainer or a team, by value."""
    return {
        name: {key: tensor.detach().clone() for key, tensor in tensors_of(part).items()}
        for name, part in owner.parts().items()
    }


def weights(run_dir: Path) -> dict[str, Any]:
    """Every tensor of the newest checkpoint: weights, optimizers, critics, counts."""
    folder = run_dir / f"checkpoints/step_{newest_step(run_dir):06d}"
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(str(file)).items()
    }


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    """That a run left what one that nobody disturbed left: metrics, weights, the best model."""
    assert metrics(run_dir) == metrics(undisturbed)
    one, other = weights(run_dir), weights(undisturbed)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert (run_dir / "best_model").exists() == (undisturbed / "best_model").exists()
    for file in undisturbed.glob("best_model/**/*.safetensors"):
        assert (run_dir / file.relative_to(undisturbed)).read_bytes() == file.read_bytes()
    for file in undisturbed.glob("best_model/best.json"):
        assert (run_dir / file.relative_to(undisturbed)).read_text() == file.read_text()
