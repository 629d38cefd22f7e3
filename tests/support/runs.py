"""Real runs in their own processes, for tests of resuming, faults and several processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
from comlrl.rollout.vllm.processes import free_port
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.commands.command_line import parse_arguments, resolve
from comlrl.trainers.launch.wiring.resolved_work import Work
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


def resolved(file: Path | str, *overrides: str) -> tuple[Config, Work, list[str]]:
    """What a command makes of a file and overrides: configuration, work and notices."""
    algorithm = algorithm_of(Path(file))
    arguments = ["--config", str(file), "--override", *overrides]
    return resolve(algorithm, parse_arguments(algorithm, arguments))


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

    @property
    def error(self) -> str:
        """The only line that tells of an error, and no traceback beside it."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.output, self.output
        return lines[0].removeprefix("error: ")

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

    def finish(
        self,
        algorithm: str,
        argv: Sequence[str],
        code: int = 0,
        seconds: float = 300,
        **environment: str,
    ) -> Process:
        """Run to the end, which must be with this exit code."""
        run = self.run(algorithm, argv, **environment)
        assert run.wait(seconds) == code, run.output
        return run

    def run_team(self, size: int, algorithm: str, argv: Sequence[str]) -> list[Process]:
        return self.team(size, {"run": [algorithm, list(argv)]})

    def finish_team(
        self, size: int, algorithm: str, argv: Sequence[str], code: int = 0, seconds: float = 300
    ) -> list[Process]:
        """Run in ``size`` processes to the end, which must be with this exit code."""
        team = self.run_team(size, algorithm, argv)
        codes = [process.wait(seconds) for process in team]
        assert codes == [code] * size, "\n".join(process.output for process in team)
        return team

    def kill_and_resume(
        self, algorithm: str, argv: Sequence[str], run_dir: Path, size: int = 1
    ) -> None:
        """Kill a run of ``size`` processes once it has a checkpoint, and resume it to its end."""
        team = [self.run(algorithm, argv)] if size == 1 else self.run_team(size, algorithm, argv)
        team[0].until(lambda: newest_step(run_dir) > 0 or team[0].code() is not None)
        assert team[0].code() is None, team[0].output
        for process in team:
            process.kill()
            process.wait()
        if size == 1:
            self.finish(algorithm, [*argv, "--resume"])
        else:
            self.finish_team(size, algorithm, [*argv, "--resume"])

    def team(self, size: int, request: dict[str, Any]) -> list[Process]:
        """The same request in ``size`` processes that torchrun might have started."""
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
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


def assert_in_sync(run_dir: Path, size: int) -> None:
    """That a finished run of ``size`` processes has the same weights in all of them."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["distributed"] == {"world_size": size, "weights_in_sync": True}


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
