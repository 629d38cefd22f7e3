"""``sweep.py`` and ``comlrl sweep``: run W&B sweep files without an account.

Repeating the command continues a stopped sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from comlrl.config.yaml_values import parse_override
from comlrl.errors import UserError, print_error, report
from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.files import read_lines, replace, tolerant_terminal
from comlrl.loop.run_lock import hold
from comlrl.run_files import CONFIG, METRICS, SUMMARY
from comlrl.trainers.launch.commands.child_runs import ChildRun, run_all
from comlrl.trainers.launch.commands.command_line import Parser, print_written
from comlrl.trainers.launch.commands.search import Sweep, begun, open_study, points, read_sweep

STATES = {TrialState.RUNNING: "started", TrialState.COMPLETE: "done", TrialState.FAIL: "failed"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        arguments = parse_arguments(argv)
        sweep = read_sweep(arguments.file)
        if arguments.jobs < 1 or (arguments.count is not None and arguments.count < 1):
            raise UserError("--count, --jobs: use at least 1")
        for item in arguments.override:
            parse_override(item)
        folder = Path(arguments.dir or Path("outputs/sweeps") / Path(arguments.file).stem)
        with hold(folder, "--dir"):
            return run_sweep(sweep, folder, arguments)
    except UserError as error:
        return report(error)


def run_sweep(sweep: Sweep, folder: Path, arguments: argparse.Namespace) -> int:
    """Run the points that are left, write the results, and return the exit code."""
    study = open_study(sweep, folder, arguments.override, arguments.seed)
    runs = child_runs(study, sweep, folder, arguments)
    try:
        with contextlib.closing(run_all(runs, arguments.jobs)) as ended:
            for run, reason, seconds in ended:
                record(study, sweep, run, reason, seconds)
                write_results(study, sweep, folder)
    except KeyboardInterrupt:
        print("interrupted; the same command continues the sweep", file=sys.stderr)
        return 130
    trials = write_results(study, sweep, folder)
    write_page(trials, folder)
    names = ("results.md", "results.csv", "parallel_coordinates.png", "comparison.html")
    print_written(f"{folder}/{', '.join(name for name in names if (folder / name).exists())}")
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    for number in failed:
        print(f"point {number} failed: {study.user_attrs[str(number)][1]}", file=sys.stderr)
    if len(failed) < len(trials):
        return 0
    print_error(
        f"sweep file: '{arguments.file}': all {len(failed)} points failed; fix what they name, "
        f"and remove {folder} to run them again"
    )
    return 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("sweep", description="Run a sweep without an account.")
    add = parser.add_argument
    add("file", metavar="FILE", help="a sweep in W&B's form, or a shipped one by name")
    add("--count", type=int, metavar="N", help="points in all; default: the grid, or 8")
    add("--jobs", type=int, default=1, metavar="N", help="points that run at the same time")
    add("--dir", metavar="DIR", help="default: outputs/sweeps/NAME")
    add("--seed", type=int, default=0, metavar="N", help="seed of the search")
    add(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help="for every point, e.g. magrpo.max_steps=20",
    )  # fmt: skip
    return parser.parse_args(argv)


def child_runs(
    study: optuna.Study, sweep: Sweep, folder: Path, arguments: argparse.Namespace
) -> Iterator[ChildRun]:
    """Yield the run of each point; a point is drawn only when it can start."""
    for number, values in points(study, sweep, arguments.count, arguments.seed):
        run_dir = folder / f"point_{number:03d}"
        run_dir.mkdir(exist_ok=True)
        more = ["wandb=null", f"output.dir={run_dir}", *arguments.override]
        line = sweep.command_line(values, more)
        if (run_dir / CONFIG).exists():  # the point was interrupted
            line.append("--resume")
        yield ChildRun(key=number, line=line, log=run_dir / "log.txt", result=run_dir / SUMMARY)


def record(
    study: optuna.Study, sweep: Sweep, run: ChildRun, error: str | None, seconds: float
) -> None:
    """Store a point's result in the study; a point without the metric counts as failed."""
    value = None if error else last_value(run.log.parent / METRICS, sweep.metric)
    if value is None:
        error = error or (
            f"no {sweep.metric} in metrics.jsonl; set eval_interval, or name a metric that is there"
        )
    study.set_user_attr(str(run.key), [seconds, error])
    study.tell(run.key, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)


def last_value(file: Path, metric: str) -> float | None:
    """Return the last value of e.g. ``eval/reward_mean`` in a run's ``metrics.jsonl``."""
    phase, _, name = metric.partition("/")
    value = None
    for record in read_lines(file) if file.is_file() else ():
        if record["phase"] == phase and record["metrics"].get(name) is not None:
            value = record["metrics"][name]
    return value


def write_results(study: optuna.Study, sweep: Sweep, folder: Path) -> list[FrozenTrial]:
    """Write a table of the points as CSV and Markdown, and a picture. Return the points, best
    first. If the seed is a parameter, the Markdown begins with the means over seeds."""
    from comlrl.loggers.report.parallel_coordinates import write_parallel_coordinates
    from comlrl.loggers.tables import table

    sign, names = -1 if sweep.maximize else 1, list(sweep.parameters)
    trials = sorted(
        begun(study, sweep), key=lambda t: (t.value is None, sign * (t.value or 0.0), t.number)
    )
    head = ["point", *names, sweep.metric, "state", "seconds", "error"]
    rows = []
    for t in trials:
        ending = study.user_attrs.get(str(t.number), (None, None))
        row = [t.number, *(t.params[n] for n in names), t.value, STATES[t.state], *ending]
        rows.append(["" if cell is None else cell for cell in row])
    text = io.StringIO()
    csv.writer(text).writerows([head, *rows])
    replace(folder / "results.csv", text.getvalue())
    done = [t for t in trials if t.value is not None]
    text_of_seeds = ""
    if "seed" in names:
        settings = [name for name in names if name != "seed"]
        head_of_seeds = [*settings, sweep.metric, "95% interval", "seeds"]
        text_of_seeds = table(head_of_seeds, means_over_seeds(done, settings, sign)) + "\n"
    replace(folder / "results.md", text_of_seeds + table(head, rows))
    if done:
        write_parallel_coordinates(
            folder / "parallel_coordinates.png",
            names,
            [t.params for t in done],
            [t.value for t in done if t.value is not None],
            sweep.metric,
            log=[name for name, p in sweep.parameters.items() if getattr(p, "log", False)],
        )
    return trials


def means_over_seeds(
    done: Sequence[FrozenTrial], settings: Sequence[str], sign: int
) -> list[list[Any]]:
    """Return a row of each setting, best first: its values, the metric's mean over the points with
    these values, the mean's 95% bootstrap interval, and the number of points."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for t in done:
        assert t.value is not None
        groups.setdefault(tuple(t.params[name] for name in settings), []).append(t.value)
    rows: list[list[Any]] = []
    for values, group in sorted(groups.items(), key=lambda item: sign * fmean(item[1])):
        low, high = bootstrap_interval(group)
        interval = f"{low:.3f} – {high:.3f}" if len(group) > 1 else ""
        rows.append([*values, fmean(group), interval, len(group)])
    return rows


def write_page(trials: Sequence[FrozenTrial], folder: Path) -> None:
    """Write the points' curves on one page, best first."""
    from comlrl.loggers.report.comparison import write_comparison
    from comlrl.loggers.report.run_data import read_run

    done = [folder / f"point_{t.number:03d}" for t in trials if t.state == TrialState.COMPLETE]
    if done:
        write_comparison([read_run(path) for path in done], folder)
