"""Training beside a process that keeps one core busy, against training alone.

    python benchmarks/bench_busy_neighbor.py [--config configs/magrpo_quickstart.yaml] \\
        [--override a.b=c] [--steps 8] [--rounds 2]

A short MAGRPO run alone and one beside a busy loop, in turn. The table has the median seconds of a
training step (the first of a run left out), those of an evaluation, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from comlrl.loggers.tables import table  # noqa: E402
from comlrl.run_files import METRICS, SUMMARY  # noqa: E402


@contextmanager
def neighbor(busy: bool) -> Iterator[None]:
    """Run a separate process that keeps a core busy, or none."""
    if not busy:
        yield
        return
    # its own session: schedulers that share cores by session count it as another program
    with subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], start_new_session=True
    ) as process:
        try:
            yield
        finally:
            process.kill()


def run(options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a step (the median, without the first) and of an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"output.dir={folder}/run", f"magrpo.max_steps={options.steps}",
            "magrpo.eval_interval=1000000", "magrpo.eval_answers=1", *options.override,
        ]  # fmt: skip
        subprocess.run(
            [
                sys.executable, "train_magrpo.py", "--config", str(options.config.resolve()),
                "--override", *settings,
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        lines = (Path(folder) / "run" / METRICS).read_text().splitlines()
        wall_seconds = json.loads((Path(folder) / "run" / SUMMARY).read_text())["wall_seconds"]
    metrics = [line["metrics"] for line in map(json.loads, lines) if line["phase"] == "train"]
    seconds = [step["step_seconds"] for step in metrics]
    return statistics.median(seconds[1:]), (wall_seconds - sum(seconds)) / 2  # before and after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "magrpo_quickstart.yaml")
    parser.add_argument("--override", nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    runs_of: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.rounds):
        for busy, runs in runs_of.items():
            with neighbor(busy):
                runs.append(run(options))
            print("busy" if busy else "quiet", runs[-1], file=sys.stderr, flush=True)
    quiet, beside = (
        [statistics.median(part) for part in zip(*runs, strict=True)] for runs in runs_of.values()
    )
    rows = [
        [name, f"{alone:.2f}", f"{other:.2f}", f"{other / alone:.2f}"]
        for name, alone, other in zip(("a step", "an evaluation"), quiet, beside, strict=True)
    ]
    print(table(["seconds of", "quiet", "busy", "ratio"], rows))


if __name__ == "__main__":
    main()
