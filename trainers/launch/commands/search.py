"""A W&B sweep file, read and searched locally: points of the search space, run as processes.

A grid is walked in order, the last parameter fastest; ``random`` is Optuna's random sampler,
``bayes`` its tree-structured Parzen estimator. The sweep's folder holds every point, so that the
same command continues where it was stopped.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from comlrl import files
from comlrl.config.yaml_values import check_values
from comlrl.errors import UserError
from comlrl.run_files import CONFIG, METRICS, SUMMARY
from comlrl.trainers.launch.checks.shipped import CONFIGS, config_file, train_command
from comlrl.trainers.launch.commands.child_runs import INTERRUPTED, ChildRuns, last_line
from comlrl.trainers.launch.commands.command_line import DEFAULT_CONFIGS

if TYPE_CHECKING:
    import optuna

KEYS = ("program", "method", "metric", "parameters", "command")
LABELS = ("name", "description", "project", "entity")  # W&B's own, of no meaning here
METHODS = ("grid", "random", "bayes")
RANGES = {  # distribution → (whole numbers, on a logarithmic scale)
    "uniform": (False, False),
    "int_uniform": (True, False),
    "q_uniform": (False, False),
    "log_uniform_values": (False, True),
}
DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "--override", "${args_no_hyphens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One key that is swept: a choice of texts, or a range of numbers."""

    name: str
    choices: tuple[str, ...] = ()  # as they stand after ``key=``
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False
    step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep file, checked."""

    path: Path
    program: str
    method: str
    metric: str  # e.g. eval/reward_mean
    maximize: bool
    parameters: tuple[Parameter, ...]
    command: tuple[str, ...]

    @property
    def grid_size(self) -> int:
        return math.prod(len(p.choices) for p in self.parameters)

    def identity(self) -> str:
        """Return what two sweeps must share for their points to be interchangeable."""
        parameters = [asdict(p) for p in self.parameters]
        return json.dumps([self.program, self.method, self.metric, parameters, self.command])

    def command_line(self, point: Mapping[str, Any], more: Sequence[str] = ()) -> list[str]:
        """Return the command line of a point's process; ``more`` overrides come last and win."""
        items = [f"{name}={value}" for name, value in point.items() if name != "config"]
        line: list[str] = []
        for part in self.command:
            match part:
                case "${env}":
                    continue
                case "${interpreter}":
                    line.append(sys.executable)
                case "${program}":
                    line += train_command(self.program) or [self.program]
                    line += [f"--config={point['config']}"] if "config" in point else []
                case "${args_no_hyphens}":
                    line += items
                case _:
                    line.append(part)
        return [*line, "--override", *more] if more else line


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep file in W&B's form. Raise UserError, naming the key, for an invalid one."""
    path = config_file(path, "sweep file", CONFIGS / "sweeps")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_values(tree, f"sweep file: '{path}'")
    except OSError as error:
        raise UserError(f"sweep file: '{path}' cannot be read ({error.strerror})") from None
    except RecursionError:
        raise UserError(f"sweep file: '{path}' is nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"sweep file: '{path}' is not valid YAML: {line}") from None
    if not isinstance(tree, dict):
        raise UserError(f"sweep file: '{path}' holds no mapping; write `method: …`")
    for key in tree:
        if key not in (*KEYS, *LABELS):
            raise UserError(f"{key}: not a key that local sweeps read; they read {_list(KEYS)}")
    method, program = tree.get("method"), tree.get("program")
    if method not in METHODS:
        raise UserError(f"method: {method!r}; give one of {_list(METHODS)}")
    if not program or train_command(program) is None:
        raise UserError(f"program: {program!r} does not exist; give a train script")
    metric = tree.get("metric") or {}
    if "/" not in str(metric.get("name")) or metric.get("goal") not in ("maximize", "minimize"):
        raise UserError(
            f"metric: {metric}; give a name such as eval/reward_mean, and goal maximize or minimize"
        )
    parameters = tuple(_parameter(n, p) for n, p in (tree.get("parameters") or {}).items())
    if not parameters:
        raise UserError("parameters: none are given; write `parameters: {key: {values: […]}}`")
    named = any(p.name == "config" for p in parameters)
    if "command" not in tree and not named and Path(program).stem[6:] not in DEFAULT_CONFIGS:
        raise UserError(
            "parameters.config: is missing, and there is no `command` with --config; give e.g. "
            "`config: {value: magrpo_quickstart}`"
        )
    ranges = [p.name for p in parameters if not p.choices]
    if method == "grid" and ranges:
        raise UserError(f"parameters.{ranges[0]}: a grid needs `values`, not a range")
    return Sweep(
        path=path,
        program=program,
        method=method,
        metric=metric["name"],
        maximize=metric["goal"] == "maximize",
        parameters=parameters,
        command=_command(tree.get("command") or DEFAULT_COMMAND),
    )


def _parameter(name: str, given: Any) -> Parameter:
    given = given if isinstance(given, dict) else {}
    kind, keys = given.get("distribution"), set(given) - {"distribution"}
    if keys == {"value"} or keys == {"values"}:
        values = given["values"] if "values" in given else [given["value"]]
        if isinstance(values, list) and values:
            return Parameter(name=name, choices=tuple(map(str, values)))
    low, high = given.get("min"), given.get("max")
    if {"min", "max"} <= keys <= {"min", "max", "q"} and all(map(_number, (low, high))):
        both_whole = isinstance(low, int) and isinstance(high, int)
        kind = kind or ("int_uniform" if both_whole else "uniform")
        if kind in RANGES and low <= high and (low > 0 or kind != "log_uniform_values"):
            whole, log = RANGES[kind]
            return Parameter(
                name=name, choices=(), low=low, high=high, whole=whole, log=log, step=given.get("q")
            )
    raise UserError(
        f"parameters.{name}: {given}; give `value`, `values`, or `min` and `max` with a "
        f"distribution of {_list(tuple(RANGES))}"
    )


def _command(parts: Sequence[Any]) -> tuple[str, ...]:
    macros = ("${env}", "${interpreter}", "${program}", "${args_no_hyphens}")
    texts = tuple(map(str, parts))
    for text in texts:
        if text.startswith("${") and text not in macros:
            raise UserError(f"command: '{text}'; local sweeps know {_list(macros)}")
    if "${args_no_hyphens}" not in texts or "--override" not in texts:
        raise UserError("command: has no `--override` with ${args_no_hyphens} after it")
    return texts


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the search space and what became of it."""

    number: int  # its folder is point_NNN
    values: Mapping[str, Any]
    state: Literal["started", "done", "failed"] = "started"
    metric: float | None = None
    seconds: float | None = None
    error: str | None = None


class Search:
    """Hands out points and takes their results; ``points.json`` holds them all."""

    def __init__(self, sweep: Sweep, folder: Path, seed: int) -> None:
        """Continue with what the folder holds.

        Raises UserError where that is another sweep, and where Optuna is needed and missing.
        """
        if sweep.method != "grid" and importlib.util.find_spec("optuna") is None:
            raise UserError(
                f"method: {sweep.method} needs Optuna; pip install optuna (the extra `sweeps`)"
            )
        self.sweep, self.seed, self.file = sweep, seed, folder / "points.json"
        self.points: dict[int, Point] = {}
        if self.file.is_file():
            held = json.loads(self.file.read_text(encoding="utf-8"))
            if held["sweep"] != sweep.identity():
                raise UserError(f"--dir: '{folder}' holds another sweep; give another one")
            self.points = {point["number"]: Point(**point) for point in held["points"]}
        self._interrupted = [p for p in self.points.values() if p.state == "started"]

    def ask(self) -> Point | None:
        """Return the next point: an interrupted one, else a new one; None: the grid is done."""
        if self._interrupted:
            return self._interrupted.pop(0)
        number = len(self.points)
        grid = self.sweep.method == "grid"
        values = self._grid_point(number) if grid else self._draw(number)
        if values is None:
            return None
        return self._keep(Point(number=number, values=values))

    def tell(self, point: Point, metric: float | None, seconds: float, error: str | None) -> None:
        """Record a point's result; without a metric it has failed."""
        state: Literal["done", "failed"] = "failed" if metric is None else "done"
        self._keep(replace(point, state=state, metric=metric, seconds=seconds, error=error))

    def _keep(self, point: Point) -> Point:
        self.points[point.number] = point
        content = {
            "sweep": self.sweep.identity(),
            "points": list(map(asdict, self.points.values())),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(self.file, json.dumps(content, indent=1) + "\n")
        return point

    def _grid_point(self, number: int) -> dict[str, Any] | None:
        points = itertools.product(*(p.choices for p in self.sweep.parameters))
        values = next(itertools.islice(points, number, None), None)
        names = [p.name for p in self.sweep.parameters]
        return None if values is None else dict(zip(names, values, strict=True))

    def _draw(self, number: int) -> dict[str, Any]:
        """Draw a point with Optuna after all points so far, seeded with the point's number.

        A sweep that is continued draws what it would have drawn at once.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = self.seed * 100_003 + number
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
        if self.sweep.method == "bayes":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # constant_liar is called experimental
                sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        goals = optuna.study.StudyDirection
        goal = goals.MAXIMIZE if self.sweep.maximize else goals.MINIMIZE
        study = optuna.create_study(direction=goal, sampler=sampler)
        space = {p.name: _distribution(p) for p in self.sweep.parameters}
        for point in self.points.values():
            if point.state != "failed":
                state = "COMPLETE" if point.state == "done" else "RUNNING"
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState[state],
                        params=dict(point.values),
                        distributions=space,
                        value=point.metric,
                    )
                )
        drawn = study.ask(space).params
        return {name: drawn[name] for name in space}


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if parameter.choices:
        return distributions.CategoricalDistribution(parameter.choices)
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.whole:
        return distributions.IntDistribution(int(low), int(high), step=int(step or 1))
    return distributions.FloatDistribution(low, high, log=parameter.log, step=step)


class Runner:
    """Runs a sweep's points as processes, several at a time."""

    def __init__(self, search: Search, folder: Path, jobs: int, overrides: Sequence[str]) -> None:
        self.search, self.folder, self.jobs, self.overrides = search, folder, jobs, overrides
        self._children = ChildRuns(jobs)

    def run(self, count: int, changed: Callable[[], None]) -> None:
        """Bring the sweep to ``count`` finished points; ``changed`` is called after each.

        A point that fails is recorded as failed and the others continue. What interrupts this ends
        the points that run, each after saving where its cadence says so; they are started again
        by the next run of the sweep.
        """
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            running: dict[concurrent.futures.Future[Result], Point] = {}
            try:
                while True:
                    finished = sum(p.state != "started" for p in self.search.points.values())
                    while len(running) < min(self.jobs, count - finished):
                        point = self.search.ask()
                        if point is None:
                            break
                        running[pool.submit(self._run, point)] = point
                    if not running:
                        return
                    done, _ = concurrent.futures.wait(
                        running, return_when=concurrent.futures.FIRST_COMPLETED
                    )
                    for future in done:
                        self._take(running.pop(future), future.result())
                    changed()
            finally:
                self._children.end()

    def _take(self, point: Point, result: Result) -> None:
        if result.code in INTERRUPTED:
            raise KeyboardInterrupt  # it was stopped, and so are we
        self.search.tell(point, result.metric, result.seconds, result.error)

    def _run(self, point: Point) -> Result:
        run_dir = self.folder / f"point_{point.number:03d}"
        run_dir.mkdir(parents=True, exist_ok=True)
        line = self.search.sweep.command_line(
            point.values, ["wandb=null", f"output.dir={run_dir}", *self.overrides]
        )
        if (run_dir / CONFIG).exists():  # it was interrupted
            line.append("--resume")
        log = run_dir / "log.txt"
        started = time.monotonic()
        ended = (run_dir / SUMMARY).exists()  # and we were killed before it was recorded
        code = 0 if ended else self._children.run(line, log)
        seconds = time.monotonic() - started
        if code:
            return Result(
                code,
                None,
                seconds,
                f"exit code {code}: {last_line(log)}",
            )
        metric = last_value(run_dir / METRICS, self.search.sweep.metric)
        missing = f"no {self.search.sweep.metric} in metrics.jsonl; set eval_interval, or name a "
        missing += "metric that is there"
        return Result(0, metric, seconds, None if metric is not None else missing)


@dataclass(frozen=True, slots=True)
class Result:
    """What a point's process came to."""

    code: int
    metric: float | None
    seconds: float
    error: str | None


def last_value(file: Path, metric: str) -> float | None:
    """Return the last value of e.g. ``eval/reward_mean`` in a run's ``metrics.jsonl``."""
    phase, _, name = metric.partition("/")
    value = None
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        record = json.loads(line)
        if record["phase"] == phase:
            found = record["metrics"].get(name)
            value = found if found is not None else value
    return value
