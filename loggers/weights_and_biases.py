"""Weights & Biases logging. No other module imports wandb.

A run does not wait for W&B or fail because of it. Without a login W&B is off; if the server cannot
be reached, the run is logged offline in its folder, for a later ``wandb sync``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from comlrl.config.sections import WandbConfig
from comlrl.errors import notice
from comlrl.files import read_entry, replace
from comlrl.loggers.samples import sample
from comlrl.loggers.views import view_of
from comlrl.loop.records import Logger, LogRecord
from comlrl.quoting import one_line, without_surrogates
from comlrl.types import Domain, RolloutResult

CONNECT_SECONDS = 20  # timeout, then the run is logged offline
FINISH_SECONDS = 60  # timeout, then the rest stays on disk
TABLE_ROWS = 16  # episodes per evaluation in the table
COLUMNS = ("env_step", "task", "problem", "completions", "reward")


def connect(
    section: WandbConfig,
    settings: Mapping[str, Any],
    domain: Domain,
    run_dir: Path,
    resume: bool,
) -> WandbLogger | None:
    """Return the logger that ``wandb`` enables, or None after a notice that says why.

    ``settings``: the run's settings, which W&B shows.
    """
    mode = section.mode or os.environ.get("WANDB_MODE", "online")
    if mode == "disabled":
        _say("off (mode: disabled)")
        return None
    if mode != "offline":
        try:
            if not wandb.login(prompt=False, timeout=CONNECT_SECONDS):
                _say("off: no login; `wandb login` or `wandb.mode=offline` turns it on")
                return None
        except Exception as error:  # wandb raises many types
            mode = _unreachable(error)
    while True:
        try:
            return WandbLogger(section, settings, domain, run_dir, resume, mode)
        except Exception as error:
            if mode == "offline":
                _say(f"off: {_reason(error)}")
                return None
            mode = _unreachable(error)


class WandbLogger(Logger):
    """Logger of metrics as ``train/…`` and ``eval/…``, and of a table of evaluation samples.

    Raises wandb's error if the run cannot be started. After a later failure, it prints one notice
    and logs nothing more.
    """

    def __init__(
        self,
        section: WandbConfig,
        settings: Mapping[str, Any],
        domain: Domain,
        run_dir: Path,
        resume: bool,
        mode: str,
    ) -> None:
        self._domain = domain
        self._columns = view_of(settings["domain"]).samples
        folder = Path(section.dir) if section.dir else run_dir
        folder.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb.json"
        previous_id = read_entry(id_file, "id") if resume else None
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or run_dir.name,
            dir=str(folder),
            tags=list(section.tags),
            config=dict(settings),
            mode="offline" if mode == "offline" else "online",
            id=previous_id,
            resume="allow" if previous_id and mode != "offline" else None,
            settings=wandb.Settings(
                init_timeout=CONNECT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                console="off",  # the live table's redraws are not worth logging
            ),
        )
        replace(id_file, json.dumps({"id": self._run.id}))
        self._run.define_metric("env_step")
        for phase in ("train", "eval"):
            self._run.define_metric(f"{phase}/*", step_metric="env_step")
        self._failed = False

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._failed:
                _say(f"nothing more is logged: {_reason(error)}")
            self._failed = True

    def log(self, record: LogRecord) -> None:
        metrics = {
            f"{record.phase}/{without_surrogates(name)}": value
            for name, value in record.metrics.items()
        }
        self._send({"update": record.update, "epoch": record.epoch, **metrics}, record.step)

    def _send(self, values: Mapping[str, Any], env_step: int) -> None:
        if not self._failed:
            with self._tolerant():
                self._run.log({"env_step": env_step, **values})

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        if record.phase != "eval" or self._failed:
            return
        with self._tolerant():
            self._send({"eval/samples": self._table(record, trees)}, record.step)

    def _table(self, record: LogRecord, trees: Sequence[RolloutResult]) -> wandb.Table:
        samples = [sample(record, tree, self._domain) for tree in trees[:TABLE_ROWS]]
        columns = [
            (heading, value_of)
            for heading, value_of in self._columns
            if any(map(value_of, samples))
        ]
        table = wandb.Table(columns=[*COLUMNS, *(heading for heading, _ in columns)])
        for episode in samples:
            table.add_data(
                record.step,
                episode["task_id"],
                episode["problem"],
                "\n\n".join(
                    f"# {role}\n{text}"
                    for role, text in zip(episode["roles_N"], episode["completions_N"], strict=True)
                ),
                episode["reward"],
                *(value_of(episode) for _, value_of in columns),
            )
        return table

    def close(self) -> None:
        with self._tolerant():
            self._run.finish()


def _unreachable(error: Exception) -> str:
    _say(f"not connected, so logging offline; `wandb sync` uploads it later ({_reason(error)})")
    return "offline"


def _reason(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__


def _say(text: str) -> None:
    notice(f"W&B: {text}")
