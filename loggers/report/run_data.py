"""Reading of run directories, for the report and the comparison."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from comlrl.config.plugins.modules import MODULES
from comlrl.errors import UserError, notice
from comlrl.files import read_lines
from comlrl.loggers.views import view_of
from comlrl.loggers.views.view import View
from comlrl.quoting import clean_json, one_line
from comlrl.run_files import (
    CONFIG,
    DOMAIN,
    ENVIRONMENT,
    LATENTS,
    METRICS,
    PREFERENCES_SUMMARY,
    SAMPLES,
    SUMMARY,
)

SCRIPT = re.compile(r"\btrain[_ ]([a-z]+)(\.py)?\b")


NUMBER = (int, float)
FIELDS: Mapping[str, Any] = {  # fields of a line and the types of their values
    "phase": str, "update": NUMBER, "task_id": str, "problem": str, "reward": NUMBER,
    "reward_task_mean": NUMBER, "roles_N": list, "completions_N": list,
}  # fmt: skip


class ReportError(UserError):
    """Raised for a directory that is not a valid run; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run directory; fields of missing files are empty."""

    path: Path
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    environment: dict[str, Any]
    records: tuple[dict[str, Any], ...]  # lines of metrics.jsonl
    samples: tuple[dict[str, Any], ...]
    latents: tuple[dict[str, Any], ...]  # SHPPO: {"step", "turn", "role", "mu"}
    preferences: dict[str, Any]  # MADPO, MARLHF: preferences_summary.json
    modules: dict[str, str]  # the user's own modules: file → SHA-256
    domain: dict[str, Any]  # domain.json

    @property
    def view(self) -> View:
        return view_of(self.domain.get("domain"))

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the agents' roles; empty if unknown."""
        sampled = self.samples[0].get("roles_N", ()) if self.samples else ()
        return tuple(self.domain.get("roles") or sampled)

    def role(self, agent: int) -> str:
        return self.roles[agent] if agent < len(self.roles) else f"agent {agent}"

    @property
    def reward_parts(self) -> list[str]:
        """Return the terms of the reward, in order; empty if it has no parts."""
        return [name[7:] for name in self.all_names if name.startswith("reward/")]

    @property
    def algorithm(self) -> str:
        """Return the algorithm from the summary; if the run did not end, from its command or the
        directory's name."""
        script = SCRIPT.search(self.environment.get("command", ""))
        named = script[1] if script else self.path.name.split("_")[0]
        return self.summary.get("algorithm") or named

    @property
    def env_steps(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def finished(self) -> bool:
        """Return whether the run has ended; False if it was resumed and has not ended again."""
        return self.summary.get("env_steps", -1) >= self.env_steps

    def series(self, phase: str, name: str) -> tuple[list[float], list[float]]:
        """Return (environment steps, values) of a metric at records where it is finite.

        Values beyond 1e100 count as infinite, as axes cannot show them.
        """
        pairs = [
            (float(record["step"]), float(record["metrics"][name]))
            for record in self.records
            if record["phase"] == phase and record["metrics"].get(name) is not None
        ]
        shown = [pair for pair in pairs if abs(pair[1]) < 1e100]
        return [x for x, _ in shown], [y for _, y in shown]

    def names(self, phase: str) -> list[str]:
        """Return all metric names of a phase, in the order in which they were first logged."""
        return list(self._names.get(phase, ()))

    @cached_property
    def _names(self) -> dict[str, dict[str, None]]:
        """Return the metric names by phase."""
        names: dict[str, dict[str, None]] = {}
        for record in self.records:
            names.setdefault(record["phase"], {}).update(dict.fromkeys(record["metrics"]))
        return names

    @property
    def all_names(self) -> list[str]:
        """Return the metric names of both phases."""
        return list(dict.fromkeys((*self.names("train"), *self.names("eval"))))

    def passes(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the samples of the first and the last evaluation; without any, those of training.

        If there was only one pass, the first list is empty.
        """
        for phase in ("eval", "train"):
            lines = [s for s in self.samples if s["phase"] == phase]
            updates = sorted({s["update"] for s in lines})
            if updates:
                last = [s for s in lines if s["update"] == updates[-1]]
                first = [s for s in lines if s["update"] == updates[0]]
                return (first if len(updates) > 1 else []), last
        return [], []


def read_run(path: str | Path) -> Run:
    """Read a run directory.

    Raises ReportError if it has no ``metrics.jsonl`` or a file is damaged.
    """
    path = Path(path)
    if not (path / METRICS).is_file():
        raise ReportError(f"{path}: not a run directory; it contains no metrics.jsonl")
    with damaged(path):
        return _read(path)


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Raise ReportError for the errors that damaged files cause when read or shown."""
    try:
        yield
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
        yaml.YAMLError,
    ) as error:  # fmt: skip
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ReportError(f"{path}: damaged: {reason}") from error


def _read(path: Path) -> Run:
    config_text = _text(path / CONFIG)
    return Run(
        path=path.resolve(),
        config=yaml.safe_load(config_text) or {},
        config_text=config_text,
        summary=_json(path / SUMMARY),
        environment=_json(path / ENVIRONMENT),
        records=_lines(path / METRICS),
        samples=tuple(read_samples(path / SAMPLES)),
        latents=_lines(path / LATENTS),
        preferences=_json(path / PREFERENCES_SUMMARY),
        domain=_json(path / DOMAIN),
        modules=_json(path / MODULES),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        return clean_json(json.loads(_text(path) or "{}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from error


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(map(clean_json, read_lines(path))) if path.is_file() else ()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``samples.jsonl`` that have the format of ``sample``.

    Other lines, e.g. left by a full disk, an editor or a merge, are reported in a notice.
    """
    lines = path.read_bytes().decode("utf-8", "replace").split("\n") if path.is_file() else []
    lines = [line for line in lines if line.strip()]
    samples = [line for line in map(_sample, lines) if line is not None]
    if len(samples) < len(lines):
        notice(f"{path}: {len(lines) - len(samples)} of {len(lines)} lines are damaged, left out")
    return samples


def _sample(text: str) -> dict[str, Any] | None:
    try:
        line = clean_json(json.loads(text))
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    parts, fields = line.get("parts", {}), [line.get(name) for name in FIELDS]
    fits = all(map(isinstance, fields, FIELDS.values())) and isinstance(line.get("facts", {}), dict)
    if not fits or len(line["roles_N"]) != len(line["completions_N"]):
        return None
    numbers = isinstance(parts, dict) and all(isinstance(v, NUMBER) for v in parts.values())
    return line if numbers else None
