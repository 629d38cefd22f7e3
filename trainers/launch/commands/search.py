"""Reading of W&B sweep files into Optuna distributions, and the study that stores a sweep's points.

A grid is enumerated in order, the last parameter fastest; ``random`` is Optuna's random sampler,
``bayes`` its tree-structured Parzen estimator.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from comlrl.config.yaml_values import check_values
from comlrl.errors import UserError
from comlrl.trainers.launch.checks.shipped import CONFIGS, config_file, train_command
from comlrl.trainers.launch.commands.command_line import DEFAULT_CONFIGS

KEYS = ("program", "method", "metric", "parameters", "command")
LABELS = ("name", "description", "project", "entity")  # only W&B uses them
SAMPLERS: Mapping[str, Callable[..., BaseSampler]] = {
    "grid": RandomSampler,  # unused: all points are enqueued
    "random": RandomSampler,
    "bayes": functools.partial(TPESampler, constant_liar=True),
}
RANGES = ("uniform", "int_uniform", "q_uniform", "log_uniform_values")
DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")  # W&B's default
MACROS = (*DEFAULT_COMMAND, "${args_no_hyphens}")
JOURNAL = "study.journal"
DEFAULT_COUNT = 8  # points of random and Bayesian searches


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The checked content of a sweep file."""

    program: str
    method: str
    metric: str  # e.g. eval/reward_mean
    maximize: bool
    parameters: Mapping[str, BaseDistribution]  # choices are strings, as after ``key=``
    command: tuple[str, ...]

    def command_line(self, point: Mapping[str, Any], more: Sequence[str] = ()) -> list[str]:
        """Return the command line of a point's process; overrides in ``more`` take precedence."""
        items = [f"{name}={value}" for name, value in point.items()]
        macros = {
            "${env}": [],
            "${interpreter}": [sys.executable],
            "${program}": train_command(self.program) or [self.program],
            "${args}": [f"--{item}" for item in items],
            "${args_no_hyphens}": items,
        }
        line = [word for part in self.command for word in macros.get(part, [part])]
        if "${args}" in self.command:  # these take precedence over --override
            return line + [f"--{item}" for item in more]
        return [*line, "--override", *more] if more else line

    def identity(self, overrides: Sequence[str], seed: int) -> str:
        """Return a text that is equal for sweeps whose points are interchangeable."""
        parameters = {name: distribution_to_json(d) for name, d in self.parameters.items()}
        fields = (self.program, self.method, self.metric, self.maximize, parameters, self.command)
        return json.dumps((*fields, overrides, seed))


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep file in W&B's format. Raises UserError, naming the key, if it is invalid."""
    path = config_file(path, "sweep file", CONFIGS / "sweeps")
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
        check_values(tree, f"sweep file: '{path}'")
        if isinstance(tree, dict):
            OmegaConf.create(text)  # refuses duplicate keys
    except OSError as error:
        raise UserError(f"sweep file: '{path}' cannot be read ({error.strerror})") from None
    except RecursionError:
        raise UserError(f"sweep file: '{path}' is nested too deep") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"sweep file: '{path}' is not valid YAML: {line}") from None
    if not isinstance(tree, dict):
        raise UserError(f"sweep file: '{path}' holds no mapping; write `method: …`")
    for key in tree:
        if key not in (*KEYS, *LABELS):
            raise UserError(f"{key}: unknown key; local sweeps read {_list(KEYS)}")
    method, program = str(tree.get("method")), tree.get("program")
    if method not in SAMPLERS:
        raise UserError(f"method: {method!r}; use one of {_list(SAMPLERS)}")
    if not isinstance(program, str) or train_command(program) is None:
        raise UserError(f"program: {program!r} does not exist; name a train script")
    match tree.get("metric"):
        case {"name": str(metric), "goal": "maximize" | "minimize" as goal} if "/" in metric:
            maximize = goal == "maximize"
        case other:
            raise UserError(
                f"metric: {other}; use a name such as eval/reward_mean, and goal maximize or "
                "minimize"
            )
    if not isinstance(tree.get("parameters"), dict) or not tree["parameters"]:
        raise UserError("parameters: missing; write `parameters: {key: {values: […]}}`")
    parameters = {str(name): _distribution(name, p) for name, p in tree["parameters"].items()}
    script = Path(program).stem.removeprefix("train_")
    if "command" not in tree and "config" not in parameters and script not in DEFAULT_CONFIGS:
        raise UserError(
            "parameters.config: is missing, and there is no `command` with --config; add e.g. "
            "`config: {value: magrpo_quickstart}`"
        )
    for name, parameter in parameters.items():
        if method == "grid" and not isinstance(parameter, CategoricalDistribution):
            raise UserError(f"parameters.{name}: a grid needs `values`, not a range")
    return Sweep(
        program=program,
        method=method,
        metric=metric,
        maximize=maximize,
        parameters=parameters,
        command=_command(tree.get("command") or DEFAULT_COMMAND),
    )


def _distribution(name: str, spec: Any) -> BaseDistribution:
    fields = dict(spec) if isinstance(spec, dict) else {}
    kind = fields.pop("distribution", None)
    try:
        match fields:
            case {"value": value} if len(fields) == 1:
                return CategoricalDistribution((str(value),))
            case {"values": [_, *_] as values} if len(fields) == 1:
                return CategoricalDistribution(tuple(map(str, values)))
            case {"min": low, "max": high} if fields.keys() <= {"min", "max", "q"}:
                integers = isinstance(low, int) and isinstance(high, int)
                kind, step = kind or ("int_uniform" if integers else "uniform"), fields.get("q")
                if kind == "int_uniform":
                    return IntDistribution(int(low), int(high), step=int(step or 1))
                if kind in RANGES:
                    return FloatDistribution(
                        float(low), float(high), log=kind == "log_uniform_values", step=step
                    )
    except (TypeError, ValueError, OverflowError):  # not numbers, or not a valid range
        pass
    raise UserError(
        f"parameters.{name}: {spec}; use `value`, `values`, or `min` and `max` with a distribution "
        f"of {_list(RANGES)}"
    )


def _command(parts: Any) -> tuple[str, ...]:
    words = tuple(map(str, parts)) if isinstance(parts, list | tuple) else (str(parts),)
    for word in words:
        if word.startswith("${") and word not in MACROS:
            raise UserError(f"command: '{word}' is unknown; local sweeps replace {_list(MACROS)}")
    if "${args}" not in words and not {"${args_no_hyphens}", "--override"} <= set(words):
        raise UserError(
            "command: contains neither ${args} nor `--override` with ${args_no_hyphens}"
        )
    return words


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def open_study(
    sweep: Sweep, folder: Path, overrides: Sequence[str] = (), seed: int = 0
) -> optuna.Study:
    """Open the study in a sweep's folder, or create it.

    Raises UserError if the folder contains another sweep, one with other overrides or another seed,
    or the state of an earlier version.
    """
    if (folder / "points.json").exists() and not (folder / JOURNAL).exists():
        raise UserError(
            f"--dir: '{folder}' holds a sweep of an earlier version (points.json), which cannot be "
            "continued; choose another folder"
        )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            study_name="sweep",
            direction="maximize" if sweep.maximize else "minimize",
            load_if_exists=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--dir: '{folder / JOURNAL}' is damaged, or cannot be written ({error}); choose "
            "another folder"
        ) from None
    identity = sweep.identity(overrides, seed)
    if study.user_attrs.get("sweep", identity) != identity:
        raise UserError(
            f"--dir: '{folder}' holds another sweep, or one with other --override or --seed; "
            "choose another folder"
        )
    study.set_user_attr("sweep", identity)
    return study


def points(
    study: optuna.Study, sweep: Sweep, count: int | None, seed: int
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and values of each point to run, interrupted ones first, until the study has
    ``count`` points.

    The sampler is seeded with the point's number, so a continued sweep draws the same points as an
    uninterrupted one. A grid ends with its last point, whatever ``count``.
    """
    interrupted = [t for t in begun(study, sweep) if t.state == TrialState.RUNNING]
    yield from ((trial.number, trial.params) for trial in interrupted)
    grid = sweep.method == "grid"
    choices = [getattr(p, "choices", ()) for p in sweep.parameters.values()]
    size = math.prod(map(len, choices)) if grid else DEFAULT_COUNT
    total = size if count is None else min(count, size) if grid else count
    while (number := len(begun(study, sweep))) < total:
        if grid and not study.get_trials(states=(TrialState.WAITING,)):
            values = next(itertools.islice(itertools.product(*choices), number, None))
            study.enqueue_trial(dict(zip(sweep.parameters, values, strict=True)))
        study.sampler = SAMPLERS[sweep.method](seed=seed * 100_003 + number)
        trial = study.ask(dict(sweep.parameters))
        yield trial.number, trial.params


def begun(study: optuna.Study, sweep: Sweep) -> list[optuna.trial.FrozenTrial]:
    """Return the points that are running or have ended, without waiting points and without one
    that was being drawn when the sweep was killed."""
    return [trial for trial in study.trials if trial.params.keys() == sweep.parameters.keys()]
